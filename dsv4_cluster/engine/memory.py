"""What an engine will need, counted before anything is allocated: weights, pools, snapshots and the peak of a step.

Which temporaries the peak of a step consists of is in step_peak.py.

On a CPU more is resident than is in use: blocks of several sizes come and go in turn and leave holes, libraries keep
scratch memory, and small blocks are not counted. `allocator` is a measured bound for that. Large blocks lie in an arena
(freed_memory.py), so it is the same in every run. Without an arena they lie in glibc's heap, where the holes depend on
where small blocks happen to lie, and equal runs differ by several blocks of the size of the residual streams.
"""

import os
from dataclasses import dataclass, fields

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.engine.freed_memory import MAX_HEAP_BLOCK
from dsv4_cluster.engine.step_peak import StepKernels, step_peak_bytes
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.snapshot_pool import SnapshotBytes
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.gemm import fp4_bytes

_TOKEN_BYTES = 32  # of the longest prompt, in host memory: its ids in the request, the sequence and lists on the way
# Of step_peak, measured with the toy preset: at most 0 to 8 % where C kernels run, 12 to 23 % where torch does.
_HELD_WITH_ARENA = {True: 1 / 8, False: 1 / 4}
_NUM_HELD_BLOCKS = 6  # without an arena; measured with the toy preset: 1 to 5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device, except the host tier's, which are host memory."""

    weights: int
    pages: int  # compressed entries and indexer keys, shared by all sequences
    sequences: int  # window and state rings, one slot per sequence
    snapshot_windows: int  # resumable boundaries: their window rows
    snapshot_states: int  # their compressor states and last hidden states
    step_peak: int  # largest sum of temporaries in one step; on a CPU also the token ids of the longest prompt
    allocator: int  # what a CPU process holds beside them, at most
    host_tier: int

    @property
    def device_total(self) -> int:
        """What has to fit on the device."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host_tier

    def describe(self) -> str:
        """One line with all numbers, in MB of 10^6 bytes."""
        parts = (f"{field.name} {getattr(self, field.name) / 1e6:,.1f}" for field in fields(self))
        return f"{', '.join(parts)} MB"

    def check(self, *, device_bytes: int, host_bytes: int, is_shared: bool) -> None:
        """Refuse a plan that cannot fit. is_shared: device and host memory are the same.

        Raises: ConfigError with all numbers and the settings that change them.
        """
        needed = self.device_total + (self.host_tier if is_shared else 0)
        if needed > device_bytes:
            raise ConfigError(
                f"the engine needs {needed / 1e6:,.1f} MB, {device_bytes / 1e6:,.1f} MB are there: {self.describe()}. "
                "Lower kv.num_pages (pages), engine.max_num_seqs (sequences), kv.num_snapshots (snapshot_windows, "
                "snapshot_states), engine.max_num_batched_tokens or engine.max_model_len (step_peak, allocator)"
            )
        if self.host_tier > host_bytes:
            raise ConfigError(
                f"kv.host_memory_bytes is {self.host_tier:,}, the host has {host_bytes:,}: {self.describe()}"
            )


def plan_memory(
    config: ModelConfig,
    layout: KVLayout,
    engine: EngineConfig,
    kv: KVConfig,
    parallel: ParallelState,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    has_fp4_experts: bool = False,
    has_arena: bool = False,
) -> MemoryPlan:
    """Count, without allocating.

    dtype: of weights and activations. max_model_len: the longest sequence, in tokens. has_fp4_experts: they stay FP4;
    experts of other checkpoints count in `dtype`, and take less when all of them turn out to be FP4 values. has_arena:
    `prepare_memory` says so.
    """
    device = torch.device(engine.device)
    kernels = StepKernels.on(device, dtype)
    num_tokens = min(engine.max_num_batched_tokens, max_model_len)
    id_lists = max_model_len * _TOKEN_BYTES if device.type == "cpu" else 0
    num_snapshots, snapshot = kv.snapshots_for(engine.max_num_seqs), SnapshotBytes.of(layout)
    step_peak = step_peak_bytes(config, dtype, kernels, num_tokens=num_tokens, context=max_model_len) + id_lists
    allocator = 0
    if device.type == "cpu":
        held = int(step_peak * _HELD_WITH_ARENA[kernels.are_native])
        allocator = held if has_arena else _held_without_arena(config, dtype, num_tokens)
    return MemoryPlan(
        weights=_weight_bytes(config, layout, kv, parallel, dtype, has_fp4_experts),
        pages=kv.num_pages * layout.page_bytes,
        sequences=engine.max_num_seqs * layout.seq_slot_bytes,
        snapshot_windows=num_snapshots * snapshot.window,
        snapshot_states=num_snapshots * snapshot.state,
        step_peak=step_peak,
        allocator=allocator,
        host_tier=kv.host_memory_bytes,
    )


def memory_of(device: torch.device) -> int:
    """Memory of a device in bytes: the GPU's, or the machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _held_without_arena(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Most freed memory that glibc keeps in its heap while steps of `num_tokens` tokens run on a CPU."""
    streams = num_tokens * dtype.itemsize * config.hc_mult * config.hidden_size
    return _NUM_HELD_BLOCKS * min(streams, MAX_HEAP_BLOCK)


def _weight_bytes(
    config: ModelConfig,
    layout: KVLayout,
    kv: KVConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    has_fp4_experts: bool,
) -> int:
    """Of the modules as they will be built, without their memory."""
    meta = torch.device("meta")
    modules: list[torch.nn.Module] = [
        Transformer(
            config, parallel, dtype=dtype, device=meta, kv_cache_dtype=kv.kv_cache_dtype, indexer_dtype=kv.indexer_dtype
        )
    ]
    if any(layer.is_mtp for layer in layout.layers):
        modules.append(MTPModule(config, parallel, dtype=dtype, device=meta, kv_cache_dtype=kv.kv_cache_dtype))
    total = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    if has_fp4_experts:
        experts = (m for module in modules for m in module.modules() if isinstance(m, Experts))
        total -= sum(p.numel() * p.element_size() - fp4_bytes(p.numel()) for m in experts for p in m.parameters())
    return total
