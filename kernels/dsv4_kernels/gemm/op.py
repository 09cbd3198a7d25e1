"""Public ops on packed weights: bf16 or fp32 operands, fp32 sums, rows independent of each other bit for bit.

Only the native kernels have a packed form; where they are absent `pack_weight` returns None and the plain torch product
on the unpacked weight is the reference.
"""

from dataclasses import dataclass

import torch

from dsv4_kernels.dispatch import choose
from dsv4_kernels.native import ops


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix [num_rows, K], or `num_groups` of them for a grouped product."""

    data: torch.Tensor  # as `native.ops.pack` returns it
    num_rows: int  # of one group
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Stacked matrices [E, N, K] of experts."""

    data: torch.Tensor  # as `native.ops.pack` or `pack_fp4` returns it
    num_weights: int

    @property
    def is_fp4(self) -> bool:
        """Codes and exponents, not values of the compute dtype."""
        return self.data.dtype == torch.uint8


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Stacked SwiGLU experts."""

    w1: PackedMatrix  # gate
    w2: PackedMatrix  # down
    w3: PackedMatrix  # up
    native: ops.ExpertSet  # the addresses of all this for the C code

    @property
    def matrices(self) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
        """w1, w2, w3."""
        return self.w1, self.w2, self.w3


def fp4_bytes(num_weights: int) -> int:
    """Memory of FP4 experts: half a byte per weight and one exponent per 32."""
    return num_weights // 2 + num_weights // ops.FP4_GROUP


def pack_weight(weight: torch.Tensor, *, num_groups: int = 1) -> PackedWeight | None:
    """weight: [num_groups * N, K]. Returns: None where no packed form exists (device, dtype, N % 16, K % 2)."""
    if choose("gemm", weight.device, weight.dtype) != "native":
        return None
    grouped = weight.view(num_groups, -1, weight.shape[1])
    return PackedWeight(ops.pack(grouped), grouped.shape[1], num_groups) if ops.can_pack(grouped) else None


def packed_linear(
    x: torch.Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T, per group of columns when there are several.

    x: [..., K] or [T, G * K] of the weight's dtype. out_dtype: fp32 or bf16, default x's.
    out: dense, of the result's shape and out_dtype, to write to. Returns: [..., num_rows] or [T, G * num_rows].
    """
    return ops.gemm(x, weight.data, weight.num_rows, out_dtype or x.dtype, weight.num_groups, out)


def pack_experts(w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, limit: float) -> PackedExperts | None:
    """w1, w3: [E, I, D]. w2: [E, D, I]. FP4 where that loses nothing, else the given dtype.

    Returns: None where no packed form exists.
    """
    if choose("gemm", w1.device, w1.dtype) != "native" or not (ops.can_pack(w1) and ops.can_pack(w2)):
        return None
    gate, down, up = (_pack_matrix(weight) for weight in (w1, w2, w3))
    native = ops.ExpertSet(_address(gate), _address(down), _address(up), w1.shape[0], w1.shape[1], limit)
    return PackedExperts(gate, down, up, native)


def packed_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: PackedExperts,
    *,
    first_expert: int,
    shared: PackedExperts | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Route rows to the experts held here, sum in order of choice, add the shared expert of every row.

    x: [T, D]. topk_ids: [T, topk] int64, global. topk_weights: [T, topk] fp32. first_expert: id of the first one held.
    shared: one expert without routing weight, or None. Returns: [T, D] of out_dtype.
    """
    everyone = None if shared is None else shared.native
    return ops.moe(x, topk_ids, topk_weights, first_expert, experts.native, everyone, out_dtype)


def shared_expert(x: torch.Tensor, expert: PackedExperts) -> torch.Tensor:
    """One expert over every row. x: [T, D]. Returns: [T, D] fp32."""
    return ops.moe(x, None, None, 0, None, expert.native, torch.float32)


def _pack_matrix(weight: torch.Tensor) -> PackedMatrix:
    codes = ops.pack_fp4(weight)
    return PackedMatrix(ops.pack(weight) if codes is None else codes, weight.numel())


def _address(matrix: PackedMatrix) -> ops.Matrix:
    first = matrix.data.data_ptr()
    return ops.Matrix(first, first + matrix.num_weights // 2 if matrix.is_fp4 else None)
