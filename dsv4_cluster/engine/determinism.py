"""Deterministic mode: choose how rows are computed, and prove on the loaded weights that they do not mix.

The native CPU kernels compute every row in an order that depends on nothing but the row (native/common.h of the
kernels), so there the mode needs no other code path: it is a promise, checked at start. Elsewhere torch picks its
algorithms by the shape of a product, and a row keeps its bits only when it is computed in passes of its own
(`engine/single_rows.py`).
"""

import logging

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.model.block import Block
from dsv4_cluster.model.transformer import Transformer
from dsv4_kernels.dispatch import choose

logger = logging.getLogger(__name__)

_ROW_COUNTS = (1, 2, 3, 5, 8, 17)  # every tile shape of the kernels
_NUM_ROWS = 40


def needs_single_rows(config: EngineConfig, model: Transformer, dtype: torch.dtype, device: torch.device) -> bool:
    """Self-test when the mode is on, explicitly or by default. Returns: True when each row needs a pass of its own.

    Raises: ConfigError when `deterministic: true` asks for what cannot hold here.
    """
    if config.deterministic is False:
        return False
    is_native = choose("gemm", device, dtype) == "native"
    if is_native and _rows_are_independent(model, dtype):
        return False
    if not config.deterministic:
        if is_native:
            logger.warning("results are not deterministic: this model has shapes that the native kernels do not take")
        return False
    if device.type != "cpu":
        raise ConfigError(f"engine.deterministic is true, which holds on device cpu only, not on {device}")
    if not _rows_repeat(model, dtype):
        raise ConfigError("engine.deterministic: the self-test failed, equal rows do not give equal results")
    return True


@torch.inference_mode()
def _rows_are_independent(model: Transformer, dtype: torch.dtype) -> bool:
    """The same rows through the first layer's experts and projections, alone and among others."""
    layer, x, ids = _inputs(model, dtype)
    whole = layer.ffn(x, ids), layer.attn.wkv(x), model.head(x[:16])
    for n in _ROW_COUNTS:
        part = layer.ffn(x[:n], ids[:n]), layer.attn.wkv(x[-n:]), model.head(x[: min(n, 16)])
        expected = whole[0][:n], whole[1][-n:], whole[2][: min(n, 16)]
        if not all(torch.equal(one, other) for one, other in zip(part, expected, strict=True)):
            return False
    return True


@torch.inference_mode()
def _rows_repeat(model: Transformer, dtype: torch.dtype) -> bool:
    """Single rows give the same bits again, from other memory."""
    layer, x, ids = _inputs(model, dtype)
    for row in x[: max(_ROW_COUNTS)].split(1):
        first, again = (
            (layer.ffn(part, ids[:1]), layer.attn.wkv(part), model.head(part)) for part in (row, row.clone())
        )
        if not all(torch.equal(one, other) for one, other in zip(first, again, strict=True)):
            return False
    return True


def _inputs(model: Transformer, dtype: torch.dtype) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """The first layer, rows [N, D] for it and their token ids."""
    layer = model.layers[0]
    assert isinstance(layer, Block), type(layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NUM_ROWS, layer.attn_norm.weight.shape[0], generator=generator).to(dtype)
    return layer, x, torch.zeros(_NUM_ROWS, dtype=torch.int64)
