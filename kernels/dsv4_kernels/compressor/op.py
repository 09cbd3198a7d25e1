"""Public compressor op. Source: spec 4.4."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation

_WORKSPACE_VALUES = 1 << 24  # fp32 values gathered at once: 64 MiB


def pool_entries(
    kv: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, *, overlap: bool, impl: str = AUTO
) -> torch.Tensor:
    """Entry e = sum over slots of softmax(gate) * kv, per channel, in fp32.

    kv, gate: [N, c * dim] fp32 per token, gate with its position bias. rows: [E, c * ratio] int64, the tokens of each
    block in order, -1 = before the sequence (gate -inf). overlap: c = 2; the first `ratio` slots are the previous
    block and give channels [0, dim), the others give [dim, 2 * dim). Every entry has at least one token.
    Returns: [E, dim] fp32. Raises: ValueError when kv and gate differ in shape.
    """
    if kv.shape != gate.shape:
        raise ValueError(f"kv {tuple(kv.shape)} and gate {tuple(gate.shape)} differ")
    module = implementation("compressor", kv.device, kv.dtype, impl)
    dim = kv.shape[1] // 2 if overlap else kv.shape[1]
    tile = max(1, _WORKSPACE_VALUES // (2 * rows.shape[1] * dim))
    if rows.shape[0] <= tile:
        return module.pool_entries(kv, gate, rows, overlap)
    return torch.cat([module.pool_entries(kv, gate, part, overlap) for part in rows.split(tile)])
