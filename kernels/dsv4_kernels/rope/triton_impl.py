"""Norm and rotation in Triton: one warp per row of a head, several rows per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.rope import reference

plain_frequencies = reference.plain_frequencies  # tables are made once, on the CPU
yarn_frequencies = reference.yarn_frequencies
rotations = reference.rotations

_ROWS = 4  # per program, one per warp


def apply_rope_(x: torch.Tensor, cis: torch.Tensor, inverse: bool) -> torch.Tensor:
    if not x.is_contiguous():
        return reference.apply_rope_(x, cis, inverse)
    rope_dim = 2 * cis.shape[-1]
    tail = x[..., x.shape[-1] - rope_dim :]
    _launch(tail, tail, x.shape[-1], None, None, cis, -1.0 if inverse else 1.0)
    return x


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, out, x.shape[-1], weight, eps, cis, 1.0)
    return out


norm_rope_ = norm_rope


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    stride: int,
    weight: torch.Tensor | None,
    eps: float | None,
    cis: torch.Tensor,
    sign: float,
) -> None:
    """x, out: [T, ..., dim] whose rows begin every `stride` elements. eps None = no norm."""
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    if num_rows == 0:
        return
    _norm_rope_kernel[(triton.cdiv(num_rows, _ROWS),)](
        x, out, weight, torch.view_as_real(cis).contiguous(), eps or 0.0, sign, num_rows, num_rows // x.shape[0],
        STRIDE=stride, D=dim, BLOCK=triton.next_power_of_2(dim), PAIRS=cis.shape[-1], ROWS=_ROWS,
        HAS_NORM=eps is not None, HAS_WEIGHT=weight is not None, num_warps=_ROWS,
    )  # fmt: skip


@triton.jit
def _norm_rope_kernel(
    x, out, weight, cis, eps, sign, num_rows, rows_per_token,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row = (rows < num_rows)[:, None]
    at = rows.to(tl.int64)[:, None] * STRIDE + column[None, :]
    is_cell = is_row & (column < D)[None, :]
    loaded = tl.load(x + at, mask=is_cell, other=0.0)
    tile = loaded.to(tl.float32)
    if HAS_NORM:
        tile *= tl.rsqrt(tl.sum(tile * tile, axis=1) / D + eps)[:, None]
        if HAS_WEIGHT:
            tile *= tl.load(weight + column, mask=column < D, other=0.0)[None, :]
        tile = tile.to(loaded.dtype).to(tl.float32)
    pair = tl.arange(0, BLOCK // 2) - (D // 2 - PAIRS)
    is_turned = ((pair >= 0) & (pair < PAIRS))[None, :]
    angle = cis + (rows // rows_per_token).to(tl.int64)[:, None] * (2 * PAIRS) + 2 * pair[None, :]
    cos = tl.load(angle, mask=is_row & is_turned, other=1.0)
    sin = tl.load(angle + 1, mask=is_row & is_turned, other=0.0) * sign
    even, odd = tl.split(tile.reshape(ROWS, BLOCK // 2, 2))
    turned_even = tl.where(is_turned, even * cos - odd * sin, even)  # where: times 1 would lose the sign of a zero
    turned_odd = tl.where(is_turned, even * sin + odd * cos, odd)
    turned = tl.join(turned_even, turned_odd).reshape(ROWS, BLOCK)
    tl.store(out + at, turned.to(loaded.dtype), mask=is_cell)
