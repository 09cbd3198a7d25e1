"""Routing in Triton: partial logits on the tensor cores, then one warp per token selects and normalises.

A few tokens spread the product over programs by chunks of the channels; many tokens take all chunks in one program. The
sums have the same order in both: within a chunk as the tensor core adds, then chunk after chunk in fp32. So a token is
routed the same way in prefill and in decode.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.router import reference

_CHUNK = 256  # channels; a sum of its own, so fixed
_STEP = 64  # of a product; fixed for the same reason
_SPREAD_TOKENS = 512  # up to here, chunks are spread over programs
_WIDE_TOKENS = (
    4096  # above, tiles twice as wide both ways, 32 by 2 programs at least: half the reads of rows and weights
)

_RENORM_FLOOR = tl.constexpr(1e-20)  # a hash-routed token may score zero on all its experts


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    input_ids: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    vocab_size: int,
    topk: int,
    renormalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return reference.route(x, weight, input_ids, bias, table, vocab_size, topk, renormalise, scaling)
    num_tokens, dim = x.shape
    num_experts = weight.shape[0]
    ids = torch.empty(num_tokens, topk, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, topk, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return ids, weights
    num_chunks = triton.cdiv(dim, _CHUNK)
    per_program = 1 if num_tokens <= _SPREAD_TOKENS else num_chunks
    num_parts = num_chunks // per_program
    logits = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    tile, warps = (128, 8) if num_tokens > _WIDE_TOKENS else (64, 4)
    _logits_kernel[(triton.cdiv(num_tokens, tile), triton.cdiv(num_experts, tile), num_parts)](
        x.contiguous(), weight.contiguous(), logits, num_tokens, D=dim, E=num_experts, BM=tile, BN=tile, BK=_STEP,
        CHUNK=_CHUNK, CHUNKS=per_program, num_warps=warps, num_stages=4,
    )  # fmt: skip
    _select_kernel[(num_tokens,)](
        logits, bias, table, input_ids, ids, weights, num_tokens, vocab_size, scaling, PARTS=num_parts, E=num_experts,
        BLOCK=triton.next_power_of_2(num_experts), TOPK=topk, WIDTH=triton.next_power_of_2(topk),
        RENORMALISE=renormalise, HAS_TABLE=table is not None, num_warps=1,
    )  # fmt: skip
    return ids, weights


@triton.jit
def _logits_kernel(
    x, weight, logits, num_tokens,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    experts = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    token = rows.to(tl.int64)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    steps: tl.constexpr = CHUNK // BK
    for i in range(CHUNKS * steps):  # one loop over all chunks: the loads of the next do not wait for the end of one
        channel = part * (CHUNKS * CHUNK) + i * BK + step
        is_channel = channel < D
        a = tl.load(
            x + token * D + channel[None, :], mask=(rows < num_tokens)[:, None] & is_channel[None, :], other=0.0
        )
        b = tl.load(
            weight + experts[None, :] * D + channel[:, None],
            mask=(experts < E)[None, :] & is_channel[:, None],
            other=0.0,
        )
        sums = tl.dot(a, b, tl.where(i % steps == 0, 0.0, sums))
        if i % steps == steps - 1:
            total += sums
    to = logits + (part.to(tl.int64) * num_tokens + token) * E + experts[None, :]
    tl.store(to, total, mask=(rows < num_tokens)[:, None] & (experts < E)[None, :])


@triton.jit
def _select_kernel(
    logits, bias, table, input_ids, ids, weights, num_tokens, vocab_size, scaling,
    PARTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr,
    RENORMALISE: tl.constexpr, HAS_TABLE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, WIDTH)
    token_id = tl.load(input_ids + token).to(tl.int64)
    is_token = (token_id >= 0) & (token_id < vocab_size)
    if HAS_TABLE:
        chosen = tl.load(table + token_id * TOPK + slot, mask=(slot < TOPK) & is_token, other=-1).to(tl.int64)
        chosen = tl.where((chosen >= 0) & (chosen < E), chosen, -1).to(tl.int32)
        sums = tl.zeros((WIDTH,), tl.float32)
        for part in range(PARTS):
            row = logits + (part * num_tokens + token) * E
            sums += tl.load(row + chosen, mask=chosen >= 0, other=0.0)
        scores = tl.where(chosen >= 0, _sqrt_softplus(sums), 0.0)
    else:
        sums = tl.zeros((BLOCK,), tl.float32)
        for part in range(PARTS):
            row = logits + (part * num_tokens + token) * E
            sums += tl.load(row + expert, mask=expert < E, other=0.0)
        all_scores = _sqrt_softplus(sums)
        biased = all_scores + tl.load(bias + expert, mask=expert < E, other=0.0)
        # One integer per expert, the sum first, then the lower expert: unique, so that a maximum names one expert.
        bits = biased.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        lowest: tl.constexpr = -(2**63)
        key = tl.where(expert < E, (ordered << 32) | (BLOCK - 1 - expert).to(tl.int64), lowest)
        chosen = tl.full((WIDTH,), -1, tl.int32)
        scores = tl.zeros((WIDTH,), tl.float32)
        for k in range(TOPK):
            best = tl.max(key, axis=0)
            picked = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
            score = tl.sum(tl.where(expert == picked, all_scores, 0.0), axis=0)
            chosen = tl.where(slot == k, picked, chosen)
            scores = tl.where(slot == k, score, scores)
            key = tl.where(key == best, lowest, key)
        chosen = tl.where(is_token, chosen, -1)
    if RENORMALISE:
        scores = scores / (tl.sum(scores, axis=0) + _RENORM_FLOOR)
    is_slot = slot < TOPK
    tl.store(ids + token * TOPK + slot, chosen, mask=is_slot)
    tl.store(weights + token * TOPK + slot, tl.where(chosen >= 0, scores * scaling, 0.0), mask=is_slot)


@triton.jit
def _sqrt_softplus(z):
    """sqrt(max(z, 0) + log1p(exp(-|z|))); log1p(e) = 2 atanh(e / (2 + e)), whose argument is at most 1/3."""
    e = tl.exp(-tl.abs(z))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 15
    series = series * q + 1.0 / 13
    series = series * q + 1.0 / 11
    series = series * q + 1.0 / 9
    series = series * q + 1.0 / 7
    series = series * q + 1.0 / 5
    series = series * q + 1.0 / 3
    return tl.sqrt(tl.maximum(z, 0.0) + 2.0 * s * (series * q + 1.0))
