"""Indexer on Hopper: FP8 keys in pages of 64 are scanned by a Gluon kernel, the rest is `triton_impl`'s."""

from functools import cache

import torch
import triton

from dsv4_kernels.gluon import TensorDescriptor, gl
from dsv4_kernels.indexer import reference, triton_impl
from dsv4_kernels.indexer.gluon_scan import DIM, ROWS, scan_kernel
from dsv4_kernels.kv.rows import PagedRows

_MAX_TOKENS = 1024  # of one launch: every program counts their pages
_MAX_HEADS = 128
_MAX_COORDINATE = 2**31 - 1  # in the pool as fp32
# Pages on their way to one program, and programs of one multiprocessor. FP8: 16 pages of 8,448 bytes in flight are
# enough, and four programs hide each other's sums better than three; FP4 takes registers for three.
RINGS = {"index_fp8": (4, 4), "index_fp4": (8, 3)}
# Types of keys and of scales, items of a key, bytes of a key: the swizzle of shared memory
_KEYS = {
    "index_fp8": ((torch.float8_e4m3fn, torch.float32), 128, 128),
    "index_fp4": ((torch.int32, torch.int32), 16, 64),
}

hadamard = reference.hadamard
index_scores = reference.index_scores
select_topk = reference.select_topk
index_topk = reference.index_topk


def index_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: PagedRows,
    page_table: torch.Tensor,
    seqs: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    ring: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    is_page = pool.format.kind in _KEYS and (pool.rows_per_page, pool.format.dim) == (ROWS.value, DIM.value)
    fits = q.shape[1] <= _MAX_HEADS and pool.pages.numel() // 4 <= _MAX_COORDINATE
    if not is_page or not fits or pool.pages.data_ptr() % 16:
        return triton_impl.index_slots(q, weights, pool, page_table, seqs, num_visible, topk)
    q, weights = q.contiguous(), weights.contiguous()
    dtypes, width, swizzle = _KEYS[pool.format.kind]
    stages, programs = ring or RINGS[pool.format.kind]
    values, factors = (pool.pages.view(dtype) for dtype in dtypes)
    layout = gl.NVMMASharedLayout(swizzle, 8 * values.itemsize, rank=2)
    keys = TensorDescriptor.from_tensor(values.view(-1, width), [ROWS.value, width], layout)
    scales = TensorDescriptor.from_tensor(factors.view(-1), [ROWS.value], gl.NVMMASharedLayout(0, 32, rank=1))
    num_heads = q.shape[1]

    def scan(part: slice, page_table: torch.Tensor, scores: torch.Tensor, maxima: torch.Tensor) -> None:
        count, columns = scores.shape[0], page_table.shape[1]
        scan_kernel[(min(count * columns, programs * _multiprocessors(q.device)),)](
            keys, scales, q[part], weights[part], page_table, seqs[part], num_visible[part], scores, maxima, count,
            columns, scores.shape[1], maxima.shape[1], topk, H=num_heads,
            HEADS=max(16, triton.next_power_of_2(num_heads)), TOKENS=max(128, triton.next_power_of_2(count)),
            STAGES=stages, num_warps=4,
        )  # fmt: skip

    return triton_impl.scan_and_select(
        scan, pool.rows_per_page, page_table, seqs, num_visible, topk, max_tokens=_MAX_TOKENS
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
