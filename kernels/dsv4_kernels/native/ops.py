"""Calls of the C kernels with tensors. Shapes and dtypes are the callers' duty."""

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from dsv4_kernels.native.library import dtype_id, load

if TYPE_CHECKING:
    from dsv4_kernels.attention.keys import BlockKeys

LANES = 16  # the kernels work on this many values side by side
MAX_HEAD_BYTES = 4096  # of one cache row
FP4_GROUP = 32  # weights along K that share a power of two


def _library() -> ctypes.CDLL:
    library = load()
    assert library is not None, "ask is_available() first"
    return library


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Interleave the output rows of [..., N, K] by 16 (and K by 2 in bf16). N % 16 = 0, K even.

    Returns: a new tensor [..., N / 16, K / 2, 16, 2] or [..., N / 16, K, 16].
    """
    *batch, n, k = weight.shape
    if weight.dtype == torch.bfloat16:
        interleaved = weight.view(*batch, n // LANES, LANES, k // 2, 2).transpose(-3, -2)
    else:
        interleaved = weight.view(*batch, n // LANES, LANES, k).transpose(-2, -1)
    packed = torch.empty(interleaved.shape, dtype=weight.dtype)
    _library().dsv4_advise_huge(packed.data_ptr(), packed.numel() * packed.itemsize)
    return packed.copy_(interleaved)


def pack_fp4(weight: torch.Tensor) -> torch.Tensor | None:
    """bf16 [..., N, K] as FP4 codes with a power of two per 32 values of K: native/fp4.h. N % 16 = 0.

    Returns: [num_weights * 17 / 32] uint8, all codes and then all exponents; None where a weight is no such product, so
    that the unpacked weights always are the given ones bit for bit.
    """
    n, k = weight.shape[-2:]
    if weight.dtype != torch.bfloat16 or k % FP4_GROUP or weight.numel() == 0:
        return None
    weight = weight.contiguous()
    num_codes = weight.numel() // 2  # bytes
    packed = torch.empty(num_codes + weight.numel() // FP4_GROUP, dtype=torch.uint8)
    _library().dsv4_advise_huge(packed.data_ptr(), packed.numel())
    is_exact = _library().dsv4_pack_fp4(
        weight.data_ptr(), weight.numel() // (n * k), n, k, packed.zero_().data_ptr(), packed[num_codes:].data_ptr()
    )
    return packed if is_exact else None


def can_pack(weight: torch.Tensor) -> bool:
    """True for shapes that `pack` takes."""
    return weight.shape[-2] % LANES == 0 and weight.shape[-1] % 2 == 0


def gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    num_rows: int,
    out_dtype: torch.dtype,
    num_groups: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., G * K] times G packed weights of `num_rows` rows, each with its own K columns of x.

    Returns: [..., G * num_rows] of out_dtype; `out`, where it is given, dense.
    """
    x = x.contiguous()
    columns = x.shape[-1]
    out = torch.empty(*x.shape[:-1], num_groups * num_rows, dtype=out_dtype) if out is None else out
    rows = x.numel() // columns
    if rows:
        _library().dsv4_gemm(
            dtype_id(x.dtype), x.data_ptr(), columns, rows, packed.data_ptr(), num_groups, num_rows,
            columns // num_groups, out.data_ptr(), num_groups * num_rows, dtype_id(out_dtype),
        )  # fmt: skip
    return out


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    num_iters: int,
    eps: float,
    norm_eps: float,
    *,
    is_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four streams x [T, 4, D] collapsed to [T, D], normed when a weight is given; post [T, 4], comb [T, 4, 4] fp32."""
    num_tokens, _, dim = x.shape
    x = x.contiguous()
    y = torch.empty(num_tokens, dim, dtype=x.dtype)
    num_mixes = 0 if is_head else num_tokens
    post, comb = torch.empty(num_mixes, 4), torch.empty(num_mixes, 4, 4)
    _library().dsv4_hc_pre(
        dtype_id(x.dtype), x.data_ptr(), num_tokens, dim, fn.data_ptr(), scale.data_ptr(), base.data_ptr(),
        _address(norm_weight), num_iters, eps, norm_eps, y.data_ptr(),
        None if is_head else post.data_ptr(), None if is_head else comb.data_ptr(),
    )  # fmt: skip
    return y, post, comb


def hc_post(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, in_place: bool = False
) -> torch.Tensor:
    """See mhc/op.py. The C code reads all streams of a channel before it writes them, so the result may replace x."""
    x, y, comb = x.contiguous(), y.contiguous(), comb.contiguous()
    out = x if in_place else torch.empty_like(x)
    _library().dsv4_hc_post(
        dtype_id(x.dtype), y.data_ptr(), x.data_ptr(), post.data_ptr(), comb.data_ptr(), x.shape[0], x.shape[2],
        out.data_ptr(),
    )  # fmt: skip
    return out


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    cis: torch.Tensor | None,
    *,
    inverse: bool = False,
    in_place: bool = False,
) -> torch.Tensor:
    """RMS norm of the rows of x [T, ..., dim] (eps None = no norm, then in place), then rotation of their tails."""
    assert x.is_contiguous(), x.stride()
    out = x if in_place or eps is None else torch.empty_like(x)
    dim = x.shape[-1]
    rows = x.numel() // dim
    if rows:
        _library().dsv4_norm_rope(
            dtype_id(x.dtype), x.data_ptr(), out.data_ptr(), rows, dim,
            _address(weight), -1.0 if eps is None else eps,
            _address(cis), 0 if cis is None else cis.shape[-1], rows // x.shape[0],
            int(inverse),
        )  # fmt: skip
    return out


def attention(q: torch.Tensor, keys: "BlockKeys", sink: torch.Tensor | None, scale: float) -> torch.Tensor:
    """See attention/op.py: block_attention. Raises: MemoryError."""
    q = q.contiguous()
    out = torch.empty_like(q)
    is_shared = keys.entry_ids is not None and keys.entry_ids.dim() == 1
    columns = 0 if keys.entry_ids is None else keys.entry_ids.shape[-1]
    failed = _library().dsv4_attention(
        dtype_id(q.dtype), q.data_ptr(), out.data_ptr(), q.shape[0], keys.block_tokens, keys.positions.data_ptr(),
        _address(keys.num_visible), q.shape[1], q.shape[2], keys.window_rows.data_ptr(), keys.window_ids.data_ptr(),
        keys.window_ids.shape[1], _address(keys.entry_rows), _address(keys.entry_ids), columns,
        0 if is_shared else columns, keys.window_first.data_ptr(), keys.window, _address(sink), scale,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the logits of {keys.block_tokens} tokens x {q.shape[1]} heads")
    return out


def pool(kv: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, overlap: bool) -> torch.Tensor:
    """See compressor/op.py."""
    if kv.stride(1) != 1 or kv.stride() != gate.stride():
        kv, gate = kv.contiguous(), gate.contiguous()
    rows, channels = rows.contiguous(), kv.shape[1]
    out = torch.empty(rows.shape[0], channels // 2 if overlap else channels)
    _library().dsv4_pool(
        kv.data_ptr(), gate.data_ptr(), rows.data_ptr(), rows.shape[0], rows.shape[1], kv.stride(0), out.shape[1],
        int(overlap), out.data_ptr(),
    )  # fmt: skip
    return out


def store_rows(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy row i of rows [N, width] uint8 to row slots[i] of the pool, an array of such rows; negative = nowhere.

    Raises: IndexError, before anything is written.
    """
    slots, rows = slots.contiguous(), rows.contiguous()
    num_rows = pool.numel() // rows.shape[1]
    wrong = _library().dsv4_store_rows(
        pool.data_ptr(), num_rows, rows.data_ptr(), slots.data_ptr(), slots.numel(), rows.shape[1]
    )
    if wrong >= 0:
        raise IndexError(f"slot {wrong} is out of range for a pool of {num_rows} rows")


def index_scores(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See indexer/op.py. q and keys have one dtype; dim is a multiple of 32. out: [T, N] fp32, dense, to write to."""
    q, keys, weights = q.contiguous(), keys.contiguous(), weights.contiguous()
    out = torch.empty(q.shape[0], keys.shape[0]) if out is None else out
    _library().dsv4_index_scores(
        dtype_id(q.dtype), q.data_ptr(), keys.data_ptr(), weights.data_ptr(), q.shape[0], q.shape[1], keys.shape[0],
        q.shape[2], out.data_ptr(),
    )  # fmt: skip
    return out


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, out: torch.Tensor) -> None:
    """See indexer/op.py. scores: [T, N] fp32. num_visible: [T] int64. out: [T, k <= N] int64. Raises: MemoryError."""
    scores, num_visible = scores.contiguous(), num_visible.contiguous()
    assert out.is_contiguous() and out.shape[1] <= scores.shape[1], (out.shape, out.stride(), scores.shape)
    failed = _library().dsv4_select_topk(
        scores.data_ptr(), num_visible.data_ptr(), scores.shape[0], scores.shape[1], out.shape[1], out.data_ptr()
    )
    if failed:
        raise MemoryError(f"no memory to select {out.shape[1]} of {scores.shape[1]} entries")


class Matrix(ctypes.Structure):
    """A packed weight as the C code knows it: matrix_t in gemm.h."""

    _fields_ = (("data", ctypes.c_void_p), ("exponents", ctypes.c_void_p))


class ExpertSet(ctypes.Structure):
    """experts_t in experts.c."""

    _fields_ = (
        ("w1", Matrix), ("w2", Matrix), ("w3", Matrix), ("num", ctypes.c_long), ("inter", ctypes.c_long),
        ("limit", ctypes.c_float),
    )  # fmt: skip


def moe(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    first_expert: int,
    routed: ExpertSet | None,
    shared: ExpertSet | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x: [T, D]. ids: [T, topk] int64. weights: [T, topk] fp32. Returns: [T, D]."""
    x = x.contiguous()
    ids, weights = ids if ids is None else ids.contiguous(), weights if weights is None else weights.contiguous()
    num_tokens, hidden = x.shape
    topk = 0 if ids is None else ids.shape[1]
    num, inter = (0, 0) if routed is None else (routed.num, routed.inter)
    dtype, shared_inter = dtype_id(x.dtype), 0 if shared is None else shared.inter
    out = torch.empty(num_tokens, hidden, dtype=out_dtype)
    scratch = torch.empty(
        _moe_scratch_bytes(dtype, num_tokens, hidden, topk, num, inter, shared_inter), dtype=torch.uint8
    )
    _library().dsv4_moe(
        dtype, x.data_ptr(), num_tokens, hidden, _address(ids),
        _address(weights), topk, first_expert,
        None if routed is None else ctypes.addressof(routed), None if shared is None else ctypes.addressof(shared),
        out.data_ptr(), dtype_id(out_dtype), scratch.data_ptr(),
    )  # fmt: skip
    return out


@cache
def _moe_scratch_bytes(*sizes: int) -> int:
    return _library().dsv4_moe_scratch_bytes(*sizes)  # type: ignore[no-any-return]


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    fixed_ids: torch.Tensor | None,
    topk: int,
    renormalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exactly one of bias and fixed_ids [T, topk] is given. Returns: ids [T, topk] int64; weights [T, topk] fp32."""
    logits = logits.contiguous()
    fixed_ids = None if fixed_ids is None else fixed_ids.contiguous()
    num_tokens, num_experts = logits.shape
    scores, ids = torch.empty_like(logits), torch.empty(num_tokens, topk, dtype=torch.int64)
    weights = torch.empty(num_tokens, topk)
    _library().dsv4_route(
        logits.data_ptr(), _address(bias),
        _address(fixed_ids), num_tokens, num_experts, topk, int(renormalise), scaling,
        scores.data_ptr(), ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights
