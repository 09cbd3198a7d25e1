"""Compressor layer: tokens of a block become one cache entry. Source: spec 4.4."""

from collections.abc import Callable

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.linear import Linear
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.step_index import CompressPlan, StepIndex, take
from dsv4_kernels.compressor import pool_entries
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

    def forward(
        self, x: torch.Tensor, index: StepIndex, plan: CompressPlan | None, state: PagedRows, entries: PagedRows
    ) -> None:
        """Write the entries that this step completes, then the state rows that later steps need.

        x: [T, D]. state: ring of fp32 rows, kv then gate. entries: paged pool. Mutates both pools.
        """
        kv = self.wkv(x)  # [T, c * dim]
        gate = self.wgate(x) + self.ape[index.block_positions(self._ratio)]
        if plan is not None:
            entries.write(plan.entry_slots, self._entries(kv, gate, plan, state, x.dtype))
        rows, slots = index.state_writes(state.rows_per_page)
        state.write(slots, take(torch.cat((kv, gate), dim=1), rows))

    def _entries(
        self, kv: torch.Tensor, gate: torch.Tensor, plan: CompressPlan, state: PagedRows, dtype: torch.dtype
    ) -> torch.Tensor:
        if plan.stored_slots.numel():
            stored_kv, stored_gate = state.gather(plan.stored_slots).split(kv.shape[1], dim=1)
            kv, gate = torch.cat((kv, stored_kv)), torch.cat((gate, stored_gate))
        pooled = pool_entries(kv, gate, plan.rows, overlap=self._overlap)  # [E, dim]
        entries = apply_rope_(self.norm(pooled.to(dtype)), plan.cis)
        return entries if self._rotate is None else self._rotate(entries)
