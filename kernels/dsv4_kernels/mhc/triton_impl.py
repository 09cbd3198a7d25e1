"""Hyper-connections in Triton: one kernel mixes and projects, one finishes. Four streams, bf16 activations.

`_mix` splits the channels of a token over programs, so that one token is spread over D / 128 of them: it forms the new
streams and their partial products with `fn`. `_finish` adds the partial products; one program per token collapses,
normalises and quantises, others do the Sinkhorn iterations of eight tokens each at the same time.

Batch-invariant: a token's sums have one order at any T, because the channel split is fixed and a row of a tensor-core
product does not depend on the other rows. `fn` enters as two bf16 parts, which keeps 16 bits of its 24; activations
are bf16 already, so nothing else is lost in the products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.mhc import reference
from dsv4_kernels.mhc.connection import Connection
from dsv4_kernels.quant.triton_codec import fp8_group_code, to_e4m3
from dsv4_kernels.triton_pdl import start_next, uses_ptx, wait_for_previous

STREAMS = 4
CHANNELS = 128  # per program of _mix; fixed, or the order of the sums would depend on the batch
_TILE = 64  # channels in registers at once
_GROUP = 128  # values per FP8 scale
_SINKHORN_TOKENS = 8
_TOKENS = 16  # of a program of _mix: with 32 or 64 the streams take the registers; 8,192 tokens took 334 us, not 877

sinkhorn = reference.sinkhorn  # alone it is no step of the model


@triton.jit
def _mix(
    x, y, post, comb, fn, out, partial, num_tokens, num_splits,
    D: tl.constexpr, NUM_MIX: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BLOCK: tl.constexpr, HAS_POST: tl.constexpr, HAS_FN: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """out = streams after hc_post; partial[t, split] = NUM_MIX products with fn, then the sum of squares."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    is_row = rows < num_tokens
    token = rows.to(tl.int64)
    columns = tl.arange(0, N)
    products = tl.zeros((BT, N), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    wait_for_previous(USE_PTX)
    if HAS_FN:  # a tile of fn is read while the one before it is multiplied
        w = _fn_tile(fn, columns, split * BLOCK, 0, D, NUM_MIX, BD)
    for first in range(0, BLOCK, BD):
        channels = split * BLOCK + first + tl.arange(0, BD)
        is_cell = is_row[:, None] & (channels < D)[None, :]
        at = token[:, None] * (4 * D) + channels[None, :]
        if HAS_POST:
            x0 = tl.load(x + at, mask=is_cell, other=0.0)
            x1 = tl.load(x + at + D, mask=is_cell, other=0.0)
            x2 = tl.load(x + at + 2 * D, mask=is_cell, other=0.0)
            x3 = tl.load(x + at + 3 * D, mask=is_cell, other=0.0)
            added = tl.load(y + token[:, None] * D + channels[None, :], mask=is_cell, other=0.0).to(tl.float32)
        for k in range(4):  # a loop: unrolled, four tiles of fn would be in registers at once
            if HAS_POST:
                c = comb + token * 16 + k
                stream = tl.load(post + token * 4 + k, mask=is_row, other=0.0)[:, None] * added
                stream += tl.load(c, mask=is_row, other=0.0)[:, None] * x0.to(tl.float32)
                stream += tl.load(c + 4, mask=is_row, other=0.0)[:, None] * x1.to(tl.float32)
                stream += tl.load(c + 8, mask=is_row, other=0.0)[:, None] * x2.to(tl.float32)
                stream += tl.load(c + 12, mask=is_row, other=0.0)[:, None] * x3.to(tl.float32)
                narrow = stream.to(tl.bfloat16)
                tl.store(out + at + k * D, narrow, mask=is_cell)
            else:
                narrow = tl.load(x + at + k * D, mask=is_cell, other=0.0)
            if HAS_FN:
                wide = narrow.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                high = w.to(tl.bfloat16)
                low = (w - high.to(tl.float32)).to(tl.bfloat16)
                following = first + (k + 1) // 4 * BD
                begin = tl.where(following < BLOCK, split * BLOCK + following, D)  # nothing is read behind the last
                w = _fn_tile(fn, columns, begin, (k + 1) % 4, D, NUM_MIX, BD)
                products = tl.dot(narrow, high, products)
                products = tl.dot(narrow, low, products)
    start_next(USE_PTX)
    if HAS_FN:
        to = partial + (token * num_splits + split) * N
        tl.store(to[:, None] + columns[None, :], products, mask=is_row[:, None] & (columns < NUM_MIX)[None, :])
        tl.store(to + NUM_MIX, squares, mask=is_row)


@triton.jit
def _fn_tile(fn, columns, begin, k, D: tl.constexpr, NUM_MIX: tl.constexpr, BD: tl.constexpr):
    """Channels from `begin` of stream k, transposed: [BD, N] fp32, zero behind D and NUM_MIX."""
    channels = begin + tl.arange(0, BD)
    at = fn + columns[None, :] * (4 * D) + k * D + channels[:, None]
    return tl.load(at, mask=(columns < NUM_MIX)[None, :] & (channels < D)[:, None], other=0.0)


@triton.jit
def _finish(
    x, partial, scale, base, norm_weight, y, post, comb, values, scales, num_tokens, num_splits, eps, norm_eps,
    D: tl.constexpr, NUM_MIX: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, NUM_ITERS: tl.constexpr, HAS_COMB: tl.constexpr, HAS_NORM: tl.constexpr, HAS_FP8: tl.constexpr,
    GROUP: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. num_tokens - 1 collapse one token each, the others form post and comb of BT tokens each."""
    wait_for_previous(USE_PTX)
    pid = tl.program_id(0)
    if pid < num_tokens:
        _collapse_token(
            pid.to(tl.int64), x, partial, scale, base, norm_weight, y, values, scales, num_splits, eps, norm_eps,
            D, NUM_MIX, N, BD, SPLITS, HAS_NORM, HAS_FP8, GROUP,
        )  # fmt: skip
    elif HAS_COMB:
        rows = (pid - num_tokens) * BT + tl.arange(0, BT)
        _form_comb(
            rows, partial, scale, base, post, comb, num_tokens, num_splits, eps, norm_eps,
            D, NUM_MIX, N, SPLITS, BT, NUM_ITERS,
        )  # fmt: skip
    start_next(USE_PTX)


@triton.jit
def _collapse_token(
    token, x, partial, scale, base, norm_weight, y, values, scales, num_splits, eps, norm_eps,
    D: tl.constexpr, NUM_MIX: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_FP8: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    splits, streams, channels = tl.arange(0, SPLITS), tl.arange(0, 4), tl.arange(0, BD)
    is_split, is_channel = splits < num_splits, channels < D
    at = token * (4 * D) + streams[:, None] * D + channels[None, :]
    tile = tl.load(x + at, mask=is_channel[None, :], other=0.0)  # [4, BD], in flight while the sums are formed
    row = partial + (token * num_splits + splits) * N
    mix = tl.sum(tl.load(row[:, None] + streams[None, :], mask=is_split[:, None], other=0.0), axis=0)  # [4]
    square = tl.sum(tl.load(row + NUM_MIX, mask=is_split, other=0.0), axis=0)
    mix = mix * tl.rsqrt(square / (4 * D) + norm_eps)
    pre = 1.0 / (1.0 + tl.exp(-(mix * tl.load(scale) + tl.load(base + streams)))) + eps
    collapsed = tl.sum(pre[:, None] * tile.to(tl.float32), axis=0).to(tl.bfloat16)
    if HAS_NORM:
        wide = collapsed.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + norm_eps)
        weight = tl.load(norm_weight + channels, mask=is_channel, other=0.0)
        collapsed = (wide * inverse * weight).to(tl.bfloat16)
    tl.store(y + token * D + channels, collapsed, mask=is_channel)
    if HAS_FP8:
        groups = collapsed.to(tl.float32).reshape(BD // GROUP, GROUP)
        code = fp8_group_code(tl.max(tl.abs(groups), axis=1))
        tl.store(values + token * D + channels, to_e4m3(groups, code[:, None]).reshape(BD), mask=is_channel)
        group = tl.arange(0, BD // GROUP)
        tl.store(scales + token * (D // GROUP) + group, code.to(tl.uint8), mask=group < D // GROUP)


@triton.jit
def _form_comb(
    rows, partial, scale, base, post, comb, num_tokens, num_splits, eps, norm_eps,
    D: tl.constexpr, NUM_MIX: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr,
    NUM_ITERS: tl.constexpr,
):  # fmt: skip
    is_row = rows < num_tokens
    token = rows.to(tl.int64)
    splits, streams, cells = tl.arange(0, SPLITS), tl.arange(0, 4), tl.arange(0, 16)
    row = partial + (token[:, None] * num_splits + splits[None, :]) * N  # [BT, SPLITS]
    is_read = is_row[:, None] & (splits < num_splits)[None, :]
    square = tl.sum(tl.load(row + NUM_MIX, mask=is_read, other=0.0), axis=1)
    inverse = tl.rsqrt(square / (4 * D) + norm_eps)
    at = row[:, :, None] + (4 + streams)[None, None, :]
    mix = tl.sum(tl.load(at, mask=is_read[:, :, None], other=0.0), axis=1)  # [BT, 4]
    gate = mix * inverse[:, None] * tl.load(scale + 1) + tl.load(base + 4 + streams)[None, :]
    tl.store(post + token[:, None] * 4 + streams[None, :], 2.0 / (1.0 + tl.exp(-gate)), mask=is_row[:, None])
    at = row[:, :, None] + (8 + cells)[None, None, :]
    mix = tl.sum(tl.load(at, mask=is_read[:, :, None], other=0.0), axis=1)  # [BT, 16]
    logits = (mix * inverse[:, None] * tl.load(scale + 2) + tl.load(base + 8 + cells)[None, :]).reshape(BT, 4, 4)
    matrix = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    matrix = matrix / tl.sum(matrix, axis=2, keep_dims=True) + eps  # token, source, destination
    matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + eps)
    for _ in range(NUM_ITERS - 1):
        matrix = matrix / (tl.sum(matrix, axis=2, keep_dims=True) + eps)
        matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + eps)
    tl.store(comb + token[:, None] * 16 + cells[None, :], matrix.reshape(BT, 16), mask=is_row[:, None])


def hc_pre(x: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _fits(x, x.dtype, connection.fn):
        return reference.hc_pre(x, connection)
    x = x.contiguous()
    partial = _project(x, connection.fn)
    y, post, comb, _, _ = _collapse(x, partial, connection)
    return y, post, comb


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not _fits(x, y.dtype, None):
        return reference.hc_post(y, x, post, comb)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_mix(x.contiguous(), y, post, comb, None, out, None)
    return out


hc_post_ = hc_post


def hc_post_pre(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, following: Connection
) -> reference.Mixed:
    if not _fits(x, y.dtype, following.fn):
        return reference.hc_post_pre(y, x, post, comb, following)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    partial = _partial(x, following.fn)
    _launch_mix(x.contiguous(), y, post, comb, following.fn, out, partial)
    return reference.Mixed(out, *_collapse(out, partial, following))


def hc_head(x: torch.Tensor, connection: Connection) -> torch.Tensor:
    if not _fits(x, x.dtype, connection.fn):
        return reference.hc_head(x, connection)
    x = x.contiguous()
    return _collapse(x, _project(x, connection.fn), connection)[0]


def _fits(x: torch.Tensor, y_dtype: torch.dtype, fn: torch.Tensor | None) -> bool:
    is_bf16 = x.dtype == torch.bfloat16 and y_dtype == torch.bfloat16
    return is_bf16 and x.shape[1] == STREAMS and (fn is None or fn.is_contiguous())


def _partial(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """Products of every channel block with fn, and its sum of squares: [T, splits, 16 or 32] fp32."""
    width = 32 if fn.shape[0] > STREAMS else 16
    return torch.empty(x.shape[0], triton.cdiv(x.shape[2], CHANNELS), width, dtype=torch.float32, device=x.device)


def _project(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    partial = _partial(x, fn)
    _launch_mix(x, None, None, None, fn, None, partial)
    return partial


def _launch_mix(
    x: torch.Tensor,
    y: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor | None,
    out: torch.Tensor | None,
    partial: torch.Tensor | None,
) -> None:
    num_tokens, _, dim = x.shape
    if num_tokens == 0:
        return
    splits = triton.cdiv(dim, CHANNELS)
    _mix[(triton.cdiv(num_tokens, _TOKENS), splits)](
        x, None if y is None else y.contiguous(), None if post is None else post.contiguous(),
        None if comb is None else comb.contiguous(), fn, out, partial, num_tokens, splits,
        D=dim, NUM_MIX=fn.shape[0] if fn is not None else 0, N=partial.shape[2] if partial is not None else 16,
        BT=_TOKENS, BD=_TILE, BLOCK=CHANNELS, HAS_POST=y is not None, HAS_FN=fn is not None, USE_PTX=uses_ptx(x),
        num_warps=4, launch_pdl=uses_ptx(x),
    )  # fmt: skip


def _collapse(
    x: torch.Tensor, partial: torch.Tensor, by: Connection
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """y, post, comb, FP8 values and scale bytes; of the head, post and comb are empty."""
    num_tokens, _, dim = x.shape
    splits = partial.shape[1]
    y = x.new_empty(num_tokens, dim)
    has_comb = by.num_iters is not None
    num_combs = num_tokens if has_comb else 0
    post = torch.empty(num_combs, STREAMS, dtype=torch.float32, device=x.device)
    comb = torch.empty(num_combs, STREAMS, STREAMS, dtype=torch.float32, device=x.device)
    values = torch.empty(num_tokens, dim, dtype=torch.float8_e4m3fn, device=x.device) if by.quantise else None
    scales = torch.empty(num_tokens, dim // _GROUP, dtype=torch.uint8, device=x.device) if by.quantise else None
    if num_tokens:
        sinkhorn_programs = triton.cdiv(num_tokens, _SINKHORN_TOKENS) if has_comb else 0
        block = triton.next_power_of_2(dim)
        _finish[(num_tokens + sinkhorn_programs,)](
            x, partial, by.scale, by.base, by.norm_weight, y, post, comb, values, scales,
            num_tokens, splits, by.eps, by.norm_eps,
            D=dim, NUM_MIX=(2 + STREAMS) * STREAMS if has_comb else STREAMS, N=partial.shape[2], BD=block,
            SPLITS=triton.next_power_of_2(splits), BT=_SINKHORN_TOKENS, NUM_ITERS=by.num_iters or 0, HAS_COMB=has_comb,
            HAS_NORM=by.norm_weight is not None, HAS_FP8=by.quantise, GROUP=_GROUP, USE_PTX=uses_ptx(x),
            num_warps=min(16, max(4, block // 1024)), launch_pdl=uses_ptx(x),
        )  # fmt: skip
    return y, post, comb, values, scales
