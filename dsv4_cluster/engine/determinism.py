"""Deterministic mode: refuse it where it cannot hold, and prove on the loaded weights that it does.

The native CPU kernels compute every row in an order that depends on nothing but the row (native/common.h of the
kernels), so the mode needs no other code path: it is a promise, checked at start.
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


def check_deterministic(config: EngineConfig, model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
    """Self-test when the mode is on, explicitly or by default.

    Raises: ConfigError when `deterministic: true` asks for what cannot hold here.
    """
    is_native = choose("gemm", device, dtype) == "native"
    if not is_native:
        if config.deterministic:
            raise ConfigError(
                "engine.deterministic is true, but it needs the native CPU kernels (device cpu, dtype bfloat16, a "
                "processor with AVX-512 BF16 and a C compiler): leave it out here"
            )
        return
    if config.deterministic is False or _rows_are_independent(model, dtype):
        return
    if config.deterministic:
        raise ConfigError("engine.deterministic: the self-test failed, rows of a product depend on their neighbours")
    logger.warning("results are not deterministic: this model has shapes that the native kernels do not take")


@torch.inference_mode()
def _rows_are_independent(model: Transformer, dtype: torch.dtype) -> bool:
    """The same rows through the first layer's experts and projections, alone and among others."""
    layer = model.layers[0]
    assert isinstance(layer, Block), type(layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NUM_ROWS, layer.attn_norm.weight.shape[0], generator=generator).to(dtype)
    ids = torch.zeros(_NUM_ROWS, dtype=torch.int64)
    whole = layer.ffn(x, ids), layer.attn.wkv(x), model.head(x[:16])
    for n in _ROW_COUNTS:
        part = layer.ffn(x[:n], ids[:n]), layer.attn.wkv(x[-n:]), model.head(x[: min(n, 16)])
        expected = whole[0][:n], whole[1][-n:], whole[2][: min(n, 16)]
        if not all(torch.equal(one, other) for one, other in zip(part, expected, strict=True)):
            return False
    return True
