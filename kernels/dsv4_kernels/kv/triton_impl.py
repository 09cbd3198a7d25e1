"""Window rows in Triton: one program, of one warp, normalises, rotates, rounds and stores one row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.kv.triton_rows import norm_row, pool_views, rotate_row, store_row


def insert(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, cis: torch.Tensor, pool: PagedRows, slots: torch.Tensor
) -> torch.Tensor:
    num_rows, dim = kv.shape
    kv = kv.contiguous()
    out = torch.empty_like(kv)
    if num_rows:
        views = pool_views(pool)
        _insert_kernel[(num_rows,)](
            kv, weight, torch.view_as_real(cis).contiguous(), slots, out, views.values, views.tail, views.codes, eps,
            views.num_slots, views.page_bytes, ROWS=pool.rows_per_page, D=dim, BLOCK=triton.next_power_of_2(dim),
            PAIRS=cis.shape[1], ROPE=pool.format.rope_dim, KIND=pool.format.kind, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _insert_kernel(
    kv, weight, cis, slots, out, values, tail, codes, eps, num_slots, page_bytes,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, ROPE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.load(kv + token * D + column, mask=column < D, other=0.0)
    normed = norm_row(row.to(tl.float32), weight, eps, D, BLOCK, True).to(row.dtype).to(tl.float32)
    turned = rotate_row(normed, cis + token * (2 * PAIRS), 1.0, D, BLOCK, PAIRS).to(row.dtype).to(tl.float32)
    stored = store_row(
        turned, tl.load(slots + token).to(tl.int64), values, tail, codes, num_slots, page_bytes, ROWS, D, BLOCK, ROPE,
        KIND,
    )  # fmt: skip
    tl.store(out + token * D + column, stored.to(row.dtype), mask=column < D)
