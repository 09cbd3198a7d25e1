"""Marlin's MXFP4 expert products: bf16 rows, FP4 weights in the order of its tensor-core fragments.

The weights are repacked from ours without loss; the rows stay bf16 where ours are FP8. Source: the operator
`moe_wna16_marlin_gemm` of vLLM's library and the layout that its packing functions describe.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dsv4_kernels.moe.fp4 import Fp4Experts, PackedFp4, unpack_codes
from dsv4_kernels.moe.reference import swiglu
from dsv4_kernels.peers import Peer, PeerCall
from dsv4_kernels.testing import relative_error

_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # the number of a type: exponent and mantissa bits, signed, finite only
_HALF_TILE = 128  # of w13: gate rows, then up rows
_BLOCKS = (8, 16, 32, 48, 64)  # rows of an expert that one block may have
_FILL = 0.9  # of a block, on average; beyond it the next block
_MOST_BLOCKS = 1024  # that run at once, each with a lock: four on a multiprocessor
_EXPERTS_AT_ONCE = 16
_ROUNDINGS = 0.06  # our rows and hidden rows are rounded to e4m3: 2^-4 at most, 0.026 on average, each

Packed = tuple[torch.Tensor, torch.Tensor]  # values, scales


def experts_peer() -> Peer:
    """Input sets have `x` [T, D] bf16, `ids` [T, topk] int32, `weights` [T, topk] fp32 and `experts`."""
    return Peer("marlin", _prepare, _ROUNDINGS, "the activation between the products; rows stay bf16")


def pack_weights(codes: torch.Tensor) -> torch.Tensor:
    """Weights as 16 x 64 tiles in fragment order.

    codes: [E, N, K] uint8 E2M1. Returns: [E, K / 16, 2 N] int32. A tile has 128 words of 8 codes; word 4 (4 c + q) + j
    has columns 16 j + 8 b + c and rows 2 q + 8 h + o, code 4 o + 2 b + h for b, h, o in 0..1.
    """
    num_experts, num_rows, num_columns = codes.shape
    lanes = codes.transpose(1, 2).reshape(num_experts, num_columns // 16, 2, 4, 2, num_rows // 64, 4, 2, 8)
    lanes = lanes.permute(0, 1, 5, 8, 3, 6, 4, 7, 2).flatten(6).int()  # [E, K / 16, N / 64, c, q, j, 8 codes]
    shift = 4 * torch.arange(8, device=codes.device, dtype=torch.int32)
    return (lanes << shift).sum(-1, dtype=torch.int32).flatten(2)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales in the order in which a thread needs them: within 64 columns 8 x 8 transposed, middle ones of 4 swapped.

    scales: [E, N, K / 32] uint8 UE8M0. Returns: [E, K / 32, N] float8_e8m0fnu.
    """
    by_group = scales.transpose(1, 2)
    turned = by_group.unflatten(2, (-1, 8, 8)).transpose(3, 4).reshape(*by_group.shape[:2], -1, 2, 2)
    return turned.transpose(3, 4).flatten(2).contiguous().view(torch.float8_e8m0fnu)


def _prepare(library: Any, inputs: Sequence[Any]) -> list[PeerCall]:
    experts = {id(one.experts): one.experts for one in inputs}  # input sets share them
    packed = {key: (_pack(one.w13), _pack(one.w2)) for key, one in experts.items()}
    return [_prepare_one(library, one, *packed[id(one.experts)]) for one in inputs]


def _prepare_one(library: Any, inputs: Any, w13: Packed, w2: Packed) -> PeerCall:
    x, ids, weights = inputs.x, inputs.ids, inputs.weights
    experts: Fp4Experts = inputs.experts
    num_tokens, topk = ids.shape
    block = _block(ids.numel() / experts.num_experts)
    routing = _route(library, ids, experts.num_experts, block)
    locks = torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=x.device)

    def product(rows: torch.Tensor, packed: Packed, slots: int) -> torch.Tensor:
        values, scales = packed
        out = rows.new_empty(ids.numel(), scales.shape[2])
        library.moe_wna16_marlin_gemm(
            rows, out, values, None, scales, None, None, None, locks, *routing, weights, block, slots, slots == 1,
            _E2M1, rows.shape[0], scales.shape[2], rows.shape[1], False, True, False, -1, -1, -1,
        )  # fmt: skip
        return out

    both = product(x, w13, topk).unflatten(1, (-1, 2, _HALF_TILE))
    hidden = swiglu(both[:, :, 0], both[:, :, 1], experts.limit).flatten(1).to(x.dtype)

    def run() -> torch.Tensor:
        product(x, w13, topk)
        return product(hidden, w2, 1).view(num_tokens, topk, -1).sum(1)

    return PeerCall(run, lambda ours, raw: relative_error(raw, ours))


def _block(rows_per_expert: float) -> int:
    """As vLLM chooses it."""
    return next((block for block in _BLOCKS if rows_per_expert / block < _FILL), _BLOCKS[-1])


def _route(library: Any, ids: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, ...]:
    """Pairs sorted by expert, every expert's padded to whole blocks; each block's expert; how many pairs."""
    most = min(ids.numel() * block, ids.numel() + num_experts * (block - 1))
    pairs = torch.empty(most, dtype=torch.int32, device=ids.device)
    owners = torch.empty(-(-most // block), dtype=torch.int32, device=ids.device)
    count = torch.empty(1, dtype=torch.int32, device=ids.device)
    library.moe_align_block_size(ids, num_experts, block, pairs, owners, count, None)
    return pairs, owners, count


def _pack(packed: PackedFp4) -> Packed:
    made = []
    for first in range(0, packed.num_experts, _EXPERTS_AT_ONCE):
        here = slice(first, first + _EXPERTS_AT_ONCE)
        part = PackedFp4(packed.words[here], packed.exponents[here], packed.block_exponent[here], packed.is_folded)
        codes, scale_bytes = unpack_codes(part)
        made.append((pack_weights(codes), pack_scales(scale_bytes)))
    values = torch.cat([one for one, _ in made])
    scales = torch.cat([one.view(torch.uint8) for _, one in made])
    return values, scales.view(torch.float8_e8m0fnu)
