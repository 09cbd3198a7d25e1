"""Inputs and the fp64 formula for attention over cache rows, with derived bounds."""

import torch

from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.quant import Fp8Rows, decode_ue8m0, encode_ue8m0
from dsv4_kernels.testing import assert_within, nan_pool, unit_roundoff
from tests.kit.sm90a import Sm90aKernel

DIM, ROPE, SCALE = 512, 64, 512**-0.5
BF16 = torch.bfloat16
_GROUP, _E4M3_MAX = 128, 448.0
_Pair = tuple[torch.Tensor, torch.Tensor]


def row_format(kind: str) -> RowFormat:
    """kind: "kv_fp8" or "plain"."""
    return RowFormat(kind, DIM, ROPE, BF16)  # type: ignore[arg-type]


def pool_and_slots(
    kind: str,
    num_pages: int,
    rows_per_page: int,
    num_tokens: int,
    columns: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> tuple[PagedRows, torch.Tensor]:
    """A pool of NaN in which every other row is written, and slots of those rows; a fifth of the columns is none."""
    pool = nan_pool(row_format(kind), num_pages, rows_per_page)
    written = torch.arange(0, num_pages * rows_per_page, 2)
    pool.write(written, torch.randn(len(written), DIM, generator=generator))
    slots = written[torch.randint(len(written), (num_tokens, columns), generator=generator)]
    none = torch.tensor([-1, -7, num_pages * rows_per_page, 1 << 40])
    none = none[torch.randint(len(none), slots.shape, generator=generator)]
    slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.2, none, slots)
    return PagedRows(pool.format, pool.pages.to(device), rows_per_page), slots.to(device)


def queries(num_tokens: int, num_heads: int, generator: torch.Generator, device: torch.device | str) -> _Pair:
    """q [T, H, 512] bf16 and rotations [T, 32]."""
    q = torch.randn(num_tokens, num_heads, DIM, generator=generator).to(BF16)
    angle = 6.3 * torch.rand(num_tokens, ROPE // 2, generator=generator)
    return q.to(device), torch.polar(torch.ones_like(angle), angle).to(device)


def named_keys(pool: PagedRows, slots: torch.Tensor, count: torch.Tensor | None) -> _Pair:
    """Rows [T, K, 512] fp64 and which of them are rows."""
    inside = (slots >= 0) & (slots < pool.num_pages * pool.rows_per_page)
    if count is not None:
        inside &= torch.arange(slots.shape[1], device=slots.device) < count[:, None]
    return pool.gather(torch.where(inside, slots, -1)).double(), inside


def assert_attention(
    out: torch.Tensor | Fp8Rows,
    q: torch.Tensor,
    keys: list[_Pair],
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
) -> None:
    """Against fp64: bf16 probabilities of logits that are fp32 sums of 512 products, and one rounding at the end.

    keys: pairs of rows [T, K, 512] fp64 and bool [T, K].
    """
    kv, inside = (torch.cat(parts, 1) for parts in zip(*keys, strict=True))
    logits = torch.einsum("thd,tkd->thk", q.double(), kv) * SCALE
    weights = torch.where(inside[:, None], logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else sink.double().exp()[:, None])
    weights = weights / torch.where(total == 0, 1.0, total)
    slip = torch.einsum("thd,tkd->thk", q.double().abs(), kv.abs()).amax(-1, keepdim=True) * SCALE * 2.0**-19
    expected, magnitude = weights @ kv, weights @ kv.abs()
    bound = magnitude * (unit_roundoff(BF16) + 2 * slip + 2.0**-18)
    if cis is not None:
        pairs = torch.view_as_complex(expected[..., -ROPE:].unflatten(-1, (-1, 2)).contiguous())
        expected[..., -ROPE:] = torch.view_as_real(pairs * cis.to(torch.complex128).conj()[:, None]).flatten(-2)
        bound[..., -ROPE:] = bound[..., -ROPE:].unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    if isinstance(out, torch.Tensor):
        assert_within(out, expected, bound + expected.abs() * unit_roundoff(BF16) * 1.01)
        return
    groups, slack = (x.flatten(1).unflatten(-1, (-1, _GROUP)) for x in (expected, bound))
    for side, holds in ((-1, torch.ge), (1, torch.le)):  # the scale of a largest magnitude within its bound
        largest = (groups.abs() + side * slack).amax(-1).clamp(min=1e-4).float() / _E4M3_MAX
        assert bool(holds(out.scales.int(), encode_ue8m0(largest).int()).all())
    scale = decode_ue8m0(out.scales).double()[..., None]
    rounding = torch.maximum(groups.abs() + slack, scale * 2.0**-6) * 2.0**-4  # half an ulp of three bits, subnormals
    actual = out.values.double().unflatten(-1, (-1, _GROUP)) * scale
    assert_within(actual, groups, slack + rounding)


def assert_attends_at_full_rate(
    kernel: Sm90aKernel, *, spill_bytes: int, spills_in_loop: int = 0, keys: int = 64
) -> None:
    """The loop over keys runs on the tensor core, half of the scores per group of warps, and keeps to the registers.

    Of 64 keys a group scores 32 in 32 steps of 16 columns, and sums 256 columns in 4 steps of 16 keys.
    spill_bytes: per thread, values of the prologue and the end that are put aside over the loop.
    """
    kernel.assert_tensor_core("HGMMA")
    kernel.assert_128bit_loads()
    loop = kernel.hot_loop()
    assert sum("HGMMA.64x32x16" in line for line in loop) == 32
    assert sum("HGMMA.64x256x16" in line for line in loop) == 4
    assert sum("LDL" in line or "STL" in line for line in loop) <= spills_in_loop, kernel.spill_bytes
    assert kernel.spill_bytes <= spill_bytes, kernel.spill_bytes
    assert kernel.shared_bytes <= 227 << 10, kernel.shared_bytes
