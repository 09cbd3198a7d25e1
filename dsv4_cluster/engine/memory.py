"""What an engine will need, counted before anything is allocated: weights, pools, snapshots and the peak of a step.

The peak is that of the longest step: `max_num_batched_tokens` tokens at the end of a prompt of `max_model_len`. Tiled
products have fixed budgets, so a longer prompt adds only what grows with it: the gathered indexer keys. The phases of a
layer follow each other, so the largest one counts, on top of what is alive through all of them.

| phase      | alive besides the streams, the sub-layer's input, the rotations and, in attention, the queries    |
|------------|--------------------------------------------------------------------------------------------------|
| compressor | values and gates in fp32, both again with rows of earlier steps; in torch gathered by block, too |
| indexer    | its queries, all keys of the prompt, one tile of scores; in torch the queries twice while they   |
|            | are rotated, or a tile of logits per head with the integers that scores are selected by          |
| attention  | its output; in torch two tiles of logits and picked rows, in C lists of rows                     |
| experts    | a row per token and choice of one tile: inputs, hidden, fp32 outputs                             |
| streams    | the streams once more; in torch also their fp32 products                                         |
| logits     | one tile of fp32 logits with its log-softmax, for prompt log-probabilities                       |

On a CPU the allocator keeps more than is in use: glibc returns freed blocks of up to 32 MB only from the end of its
heap, so that blocks of several sizes, which come and go in turn, leave holes. How many is chance: equal runs differ by
several blocks. `allocator` is a bound, in blocks of the size of the residual streams, above what was measured when
large steps give free memory back at their end (freed_memory.py).
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
from dsv4_cluster.kv.snapshot_pool import SnapshotBytes
from dsv4_cluster.model.moe_layer import expert_tile_tokens
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.dispatch import choose
from dsv4_kernels.gemm import fp4_bytes

_SCORE_VALUES = 1 << 20  # fp32 logits that the indexer holds at once
_ATTENTION_VALUES = 1 << 22  # fp32 logits, or values of picked rows, that the torch attention holds at once
_TILE_ROWS = 128  # most queries of a tile in the torch attention
_SELECT_BYTES = 17  # per score while torch finds the top k: fp32 twice, an int64, a bool
_FP32, _INT64 = 4, 8
_MAX_HEAP_BLOCK = 32 << 20  # larger blocks never come from glibc's heap (DEFAULT_MMAP_THRESHOLD_MAX)
_NUM_HELD_BLOCKS = 8  # measured with the toy preset: 1 to 7


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device, except the host tier's, which are host memory."""

    weights: int
    pages: int  # compressed entries and indexer keys, shared by all sequences
    sequences: int  # window and state rings, one slot per sequence
    snapshot_windows: int  # resumable boundaries: their window rows
    snapshot_states: int  # their compressor states and last hidden states
    step_peak: int  # largest sum of temporaries in one step
    allocator: int  # freed memory that the CPU allocator keeps beside them, at most
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
) -> MemoryPlan:
    """Count, without allocating.

    dtype: of weights and activations. max_model_len: the longest sequence, in tokens. has_fp4_experts: they stay FP4;
    experts of other checkpoints count in `dtype`, and take less when all of them turn out to be FP4 values.
    """
    device = torch.device(engine.device)
    is_native = choose("indexer", device, dtype) == "native"
    num_tokens = min(engine.max_num_batched_tokens, max_model_len)
    num_snapshots, snapshot = kv.snapshots_for(engine.max_num_seqs), SnapshotBytes.of(layout)
    return MemoryPlan(
        weights=_weight_bytes(config, layout, kv, parallel, dtype, has_fp4_experts),
        pages=kv.num_pages * layout.page_bytes,
        sequences=engine.max_num_seqs * layout.seq_slot_bytes,
        snapshot_windows=num_snapshots * snapshot.window,
        snapshot_states=num_snapshots * snapshot.state,
        step_peak=step_peak_bytes(config, dtype, num_tokens=num_tokens, context=max_model_len, is_native=is_native),
        allocator=allocator_bytes(config, dtype, num_tokens) if device.type == "cpu" else 0,
        host_tier=kv.host_memory_bytes,
    )


def step_peak_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int, context: int, is_native: bool) -> int:
    """Largest sum of temporaries of a step of `num_tokens` tokens that ends at `context` tokens of a sequence.

    is_native: the C kernels run, not the torch ones.
    """
    size, dim, hidden = dtype.itemsize, config.head_dim, config.hidden_size
    streams = num_tokens * size * config.hc_mult * hidden
    alive = streams + num_tokens * (2 * hidden * size + config.qk_rope_head_dim * _INT64)
    queries = num_tokens * size * (config.num_attention_heads * dim + config.q_lora_rank + 2 * dim)
    lists = num_tokens * (config.sliding_window + 32) * _INT64 if is_native else 0
    phases = (
        queries + lists + num_tokens * dim * _FP32 * (8 if is_native else 16),  # two channel sets of values and gates
        queries + lists + _indexer_bytes(config, size, num_tokens, context, is_native),
        queries + lists + _attention_bytes(config, size, num_tokens, context, is_native),
        _expert_bytes(config, size, num_tokens, is_native),
        streams if is_native else 2 * num_tokens * _FP32 * config.hc_mult * hidden,
        3 * min(LOGITS_TILE_BYTES, num_tokens * config.vocab_size * _FP32),
    )
    return alive + max(phases)


def allocator_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Most freed memory that glibc keeps in its heap while steps of `num_tokens` tokens run on a CPU."""
    streams = num_tokens * dtype.itemsize * config.hc_mult * config.hidden_size
    return _NUM_HELD_BLOCKS * min(streams, _MAX_HEAP_BLOCK)


def memory_of(device: torch.device) -> int:
    """Memory of a device in bytes: the GPU's, or the machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _indexer_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, is_native: bool) -> int:
    num_keys = context // 4
    queries = num_tokens * config.index_n_heads * config.index_head_dim * size
    keys = num_keys * config.index_head_dim * size
    tile = max(1, min(num_tokens, _SCORE_VALUES // max(1, config.index_n_heads * num_keys)))  # queries
    if is_native:
        return queries + keys + tile * num_keys * _FP32
    wide_keys = num_keys * config.index_head_dim * _FP32 if size < _FP32 else 0
    logits = tile * (config.index_n_heads + 1) * num_keys * _FP32
    return queries + max(queries, keys + wide_keys + max(logits, tile * num_keys * _SELECT_BYTES))


def _attention_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, is_native: bool) -> int:
    out = num_tokens * config.num_attention_heads * config.head_dim * size
    if is_native:
        return out + num_tokens * (config.index_topk + 16) * 2 * _INT64  # picks, and their rows
    num_entries = max(min(context // 4, config.index_topk), context // 128)
    columns = config.sliding_window + _TILE_ROWS + num_entries
    widest = max(config.num_attention_heads * columns, num_entries * config.head_dim)
    tile = max(1, min(_TILE_ROWS, num_tokens, _ATTENTION_VALUES // widest))
    return out + 2 * tile * widest * _FP32


def _expert_bytes(config: ModelConfig, size: int, num_tokens: int, is_native: bool) -> int:
    """Of one tile, and the output of all tokens."""
    num_pairs = min(num_tokens, expert_tile_tokens(config)) * config.num_experts_per_tok
    out = num_tokens * config.hidden_size * size
    if is_native:
        return out + num_pairs * (config.hidden_size * (size + _FP32) + config.moe_intermediate_size * size)
    # In torch: inputs and outputs, the latter in fp32 and again by pair; gate, up and hidden.
    return out + num_pairs * (config.hidden_size * (2 * size + 2 * _FP32) + 3 * config.moe_intermediate_size * size)


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
