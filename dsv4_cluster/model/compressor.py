"""Compressor layer: tokens of a block become one cache entry. Source: spec 4.4."""

from collections.abc import Callable

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.linear import Linear
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.step_index import CompressPlan, StepIndex, take
from dsv4_kernels.compressor import pool_entries
from dsv4_kernels.gemm import PackedWeight, pack_weight, packed_linear
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.rope import apply_rope_


class Compressor(nn.Module):
    """Outputs of the projections, gates and pooled sums are fp32. Replicated on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        ratio: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rotate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """ratio: 4 (two overlapping channel sets) or 128. dim: of an entry. rotate: applied to finished entries."""
        super().__init__()
        self._ratio = ratio
        self._overlap = ratio == 4
        self._rotate = rotate
        num_channels = dim * (2 if self._overlap else 1)
        ape = torch.empty(ratio, num_channels, dtype=torch.float32, device=device)
        self.ape = nn.Parameter(ape, requires_grad=False)
        hidden, wide = config.hidden_size, torch.float32
        self.wkv = Linear(hidden, num_channels, dtype=dtype, device=device, out_dtype=wide)
        self.wgate = Linear(hidden, num_channels, dtype=dtype, device=device, out_dtype=wide)
        self.norm = RMSNorm(dim, config.rms_norm_eps, device=device)
        self._packed: PackedWeight | None = None  # both projections as one

    def pack(self) -> None:
        """As `Linear.pack`; call it instead of packing the two projections."""
        weights = self.wkv.weight, self.wgate.weight
        self._packed = pack_weight(torch.cat(weights))
        if self._packed is not None:
            for weight, data in zip(weights, self._packed.data.view(2, *weights[0].shape), strict=True):
                weight.data = data  # one copy in memory

    def forward(
        self, x: torch.Tensor, index: StepIndex, plan: CompressPlan | None, state: PagedRows, entries: PagedRows
    ) -> None:
        """Write the entries that this step completes, then the state rows that later steps need.

        x: [T, D]. state: ring of fp32 rows, kv then gate. entries: paged pool. Mutates both pools.
        """
        num_stored = 0 if plan is None else plan.stored_slots.shape[0]
        tokens = self._project(x, num_stored)
        fresh = tokens[: x.shape[0]]
        fresh[:, self.ape.shape[1] :] += self.ape[index.block_positions(self._ratio)]
        if plan is not None:
            tokens[x.shape[0] :] = state.gather(plan.stored_slots)
            entries.write(plan.entry_slots, self._entries(tokens, plan, x.dtype))
        rows, slots = index.state_writes(state.rows_per_page)
        state.write(slots, take(fresh, rows))

    def _project(self, x: torch.Tensor, num_more: int) -> torch.Tensor:
        """x: [T, D]. Returns: [T + num_more, 2 * c * dim] fp32, kv then gate; the rows behind x's are not set."""
        num_tokens, num_channels = x.shape[0], self.ape.shape[1]
        out = torch.empty(num_tokens + num_more, 2 * num_channels, dtype=torch.float32, device=x.device)
        if self._packed is not None:
            packed_linear(x, self._packed, torch.float32, out[:num_tokens])
        else:
            out[:num_tokens, :num_channels] = self.wkv(x)
            out[:num_tokens, num_channels:] = self.wgate(x)
        return out

    def _entries(self, tokens: torch.Tensor, plan: CompressPlan, dtype: torch.dtype) -> torch.Tensor:
        """tokens: state rows of this step, then those of earlier ones. Returns: [E, dim]."""
        kv, gate = tokens.chunk(2, dim=1)
        pooled = pool_entries(kv, gate, plan.rows, overlap=self._overlap)  # [E, dim]
        entries = apply_rope_(self.norm(pooled.to(dtype)), plan.cis)
        return entries if self._rotate is None else self._rotate(entries)
