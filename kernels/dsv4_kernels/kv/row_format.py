"""The storage formats of cache rows. Source: spec 6.1."""

from dataclasses import dataclass
from typing import Literal

import torch

RowKind = Literal["plain", "kv_fp8", "index_fp8", "index_fp4"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How one row is stored.

    plain: `dim` values of `dtype`.
    kv_fp8: `dim - rope_dim` e4m3 values, `rope_dim` bf16 values, one UE8M0 byte per 64 e4m3 values, padded to 8.
    index_fp8: `dim` e4m3 values and one fp32 power-of-two scale.
    index_fp4: `dim / 2` packed e2m1 bytes and one UE8M0 byte per 32 values.
    """

    kind: RowKind
    dim: int
    rope_dim: int = 0
    dtype: torch.dtype = torch.float32  # of the stored values when plain, of gathered rows otherwise
