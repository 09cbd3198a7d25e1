"""What an engine will need, counted before anything is allocated: weights, pools, snapshots and the peak of a step.

The peak is that of the longest step: `max_num_batched_tokens` tokens at the end of a prompt of `max_model_len`. It
counts what is asked for at the same time; an allocator may keep more. Tiled products use fixed budgets, so a longer
prompt adds only what grows with it: gathered keys and, in the torch attention, entries. The phases of a layer follow
each other, so the largest one counts, on top of what is alive through all of them.

| phase     | alive besides the residual streams, the sub-layer's input and the queries                         |
|-----------|---------------------------------------------------------------------------------------------------|
| indexer   | its queries, all keys of the prompt, one tile of scores with the integers they are selected by; in |
|           | torch also the keys in fp32, and one tile of logits per head instead where that is more           |
| attention | in torch: all entries as stored and in fp32, two tiles of logits; in C: lists of window rows       |
| experts   | a row per token and chosen expert: inputs, hidden, fp32 outputs; in torch gate, up and sums too    |
| logits    | one tile of fp32 logits with its log-softmax, for prompt log-probabilities                         |
"""

import os
from dataclasses import dataclass, fields

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.engine.model_runner import LOGITS_TILE_BYTES
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.snapshot_pool import snapshot_bytes
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.dispatch import choose
from dsv4_kernels.gemm import fp4_bytes

_TILE_VALUES = 1 << 24  # fp32 values that a tiled product of the kernels holds at once
_TILE_ROWS = 128  # most queries of a tile in the torch attention
_SELECT_BYTES = 29  # per score while the top k are found: fp32, three int64, one bool
_FP32 = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device, except the host tier's, which are host memory."""

    weights: int
    pages: int  # compressed entries and indexer keys, shared by all sequences
    sequences: int  # window and state rings, one slot per sequence
    snapshots: int  # resumable boundaries
    step_peak: int  # largest sum of temporaries in one step
    host_tier: int

    @property
    def device_total(self) -> int:
        """What has to fit on the device."""
        return self.weights + self.pages + self.sequences + self.snapshots + self.step_peak

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
                "Lower kv.num_pages (pages), engine.max_num_seqs (sequences), kv.num_snapshots (snapshots), "
                "engine.max_num_batched_tokens or engine.max_model_len (step_peak)"
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
) -> MemoryPlan:
    """Count, without allocating.

    dtype: of weights and activations. max_model_len: the longest sequence, in tokens. has_fp4_experts: they stay FP4;
    experts of other checkpoints count in `dtype`, and take less when all of them turn out to be FP4 values.
    """
    is_native = choose("indexer", torch.device(engine.device), dtype) == "native"
    return MemoryPlan(
        weights=_weight_bytes(config, layout, kv, parallel, dtype, has_fp4_experts),
        pages=kv.num_pages * layout.page_bytes,
        sequences=engine.max_num_seqs * layout.seq_slot_bytes,
        snapshots=kv.snapshots_for(engine.max_num_seqs) * snapshot_bytes(layout),
        step_peak=step_peak_bytes(
            config,
            dtype,
            num_tokens=min(engine.max_num_batched_tokens, max_model_len),
            context=max_model_len,
            is_native=is_native,
        ),
        host_tier=kv.host_memory_bytes,
    )


def step_peak_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int, context: int, is_native: bool) -> int:
    """Largest sum of temporaries of a step of `num_tokens` tokens that ends at `context` tokens of a sequence.

    is_native: the C kernels run, not the torch ones.
    """
    size = dtype.itemsize
    streams = config.hc_mult * config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    alive = num_tokens * size * (2 * streams + config.hidden_size)
    attention = num_tokens * size * (queries + config.q_lora_rank + config.head_dim)
    phases = (
        attention + _indexer_bytes(config, size, num_tokens, context, is_native),
        attention + _attention_bytes(config, size, num_tokens, context, is_native),
        _expert_bytes(config, size, num_tokens, is_native),
        3 * min(LOGITS_TILE_BYTES, num_tokens * config.vocab_size * _FP32),
    )
    return alive + max(phases)


def memory_of(device: torch.device) -> int:
    """Memory of a device in bytes: the GPU's, or the machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _indexer_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, is_native: bool) -> int:
    num_keys = context // 4
    queries = num_tokens * config.index_n_heads * config.index_head_dim * size
    tile = max(1, min(num_tokens, _TILE_VALUES // max(1, config.index_n_heads * num_keys)))  # queries
    selection = tile * num_keys * _SELECT_BYTES
    keys = num_keys * config.index_head_dim * size
    if is_native:
        return queries + keys + selection
    wide_keys = num_keys * config.index_head_dim * _FP32 if size < _FP32 else 0
    return queries + keys + wide_keys + max(selection, tile * config.index_n_heads * num_keys * _FP32)


def _attention_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, is_native: bool) -> int:
    out = num_tokens * config.num_attention_heads * config.head_dim * size
    if is_native:
        return out + num_tokens * (config.sliding_window + 16 + config.index_topk) * 8  # int64 rows to look at
    num_entries = context // 4
    entries = num_entries * config.head_dim * (size + (_FP32 if size < _FP32 else 0))
    width = config.num_attention_heads * (config.sliding_window + _TILE_ROWS + num_entries)
    tile = max(1, min(_TILE_ROWS, num_tokens, _TILE_VALUES // width))
    return out + entries + 2 * tile * width * _FP32


def _expert_bytes(config: ModelConfig, size: int, num_tokens: int, is_native: bool) -> int:
    num_pairs = num_tokens * config.num_experts_per_tok
    if is_native:
        return num_pairs * (config.hidden_size * (size + _FP32) + config.moe_intermediate_size * size)
    # In torch: inputs and outputs, the latter in fp32 and again by pair; gate, up and hidden.
    return num_pairs * (config.hidden_size * (2 * size + 2 * _FP32) + 3 * config.moe_intermediate_size * size)


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
