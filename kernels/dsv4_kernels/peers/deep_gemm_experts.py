"""DeepGEMM's expert kernel for Hopper: rows quantised by one launch, everything else in a second one, FP8 weights.

The kernel also exchanges rows among ranks; here it runs with one. The weights are ours in e4m3 with 128 x 128 scales,
exact wherever ours are folded: same values, twice the bytes. Source: signatures of the package deep_gemm.
"""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4_kernels.moe.fp4 import Fp4Experts, PackedFp4, unpack_codes
from dsv4_kernels.peers import Peer, PeerCall
from dsv4_kernels.quant import decode_e2m1, decode_ue8m0
from dsv4_kernels.testing import relative_error

_BLOCK = 128
_TOP = 6  # log2 of the factor of a block's largest group: 6 * 2^6 is below e4m3's 448
_EXPERTS_AT_ONCE = 16
_ROUNDINGS = 0.09  # both round rows and hidden rows to e4m3, by other scales: 0.026 on average, four times

Fp8Blocks = tuple[torch.Tensor, torch.Tensor]  # [E, N, K] float8_e4m3fn; [E, N / 128, K / 128] fp32


def experts_peer() -> Peer:
    """Input sets have `x` [T, D] bf16, `ids` [T, topk] int32, `weights` [T, topk] fp32 and `experts`."""
    return Peer("deep_gemm", _prepare, _ROUNDINGS, "FP4: its weights are FP8")


def to_fp8(packed: PackedFp4) -> Fp8Blocks:
    """Weights in their original order, every group's scale relative to its block's folded into the values."""
    made = []
    for first in range(0, packed.num_experts, _EXPERTS_AT_ONCE):
        here = slice(first, first + _EXPERTS_AT_ONCE)
        part = PackedFp4(packed.words[here], packed.exponents[here], packed.block_exponent[here], packed.is_folded)
        codes, bytes_of_groups = unpack_codes(part)
        grid = bytes_of_groups.unflatten(2, (-1, 4)).unflatten(1, (-1, _BLOCK))  # [E, N / 128, 128, K / 128, 4]
        top = grid.amax((2, 4))
        offset = grid.int() - top[:, :, None, :, None].int() + _TOP
        factor = torch.exp2(offset.float()).flatten(3, 4).flatten(1, 2)  # [E, N, K / 32]
        values = decode_e2m1(codes) * factor.repeat_interleave(32, dim=2)
        made.append((values.to(torch.float8_e4m3fn), decode_ue8m0(top - _TOP)))
    return torch.cat([one for one, _ in made]), torch.cat([one for _, one in made])


def matrices(experts: Fp4Experts) -> tuple[Fp8Blocks, Fp8Blocks]:
    """Gate rows, then up rows; down."""
    values, scales = to_fp8(experts.w13)
    values = values.unflatten(1, (-1, 2, _BLOCK)).transpose(1, 2).flatten(1, 3)
    scales = scales.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return (values, scales), to_fp8(experts.w2)


def _prepare(library: Any, inputs: Sequence[Any]) -> list[PeerCall]:
    experts = {id(one.experts): one.experts for one in inputs}  # input sets share them
    made = {key: library.transform_weights_for_mega_moe_sm90(*matrices(one)) for key, one in experts.items()}
    first = inputs[0]
    num_tokens, hidden_size = first.x.shape
    sizes = first.experts.num_experts, num_tokens, first.ids.shape[1], hidden_size, first.experts.intermediate_size
    buffer = library.get_symm_buffer_for_mega_moe(_group(first.x.device), *sizes)
    out = torch.empty_like(first.x)

    def run(one: Any) -> torch.Tensor:
        library.mega_moe_pre_dispatch_sm90(
            one.x, one.ids, one.weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, num_tokens
        )
        library.fp8_mega_moe(out, *made[id(one.experts)], buffer, activation_clamp=one.experts.limit)
        return out

    return [PeerCall(partial(run, one), lambda ours, raw: relative_error(raw, ours)) for one in inputs]


def _group(device: torch.device) -> Any:
    """The process group of this process alone."""
    if not dist.is_initialized():
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD
