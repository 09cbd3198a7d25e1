"""Checkpoint directory -> model and pools on the rank's device, with every refusal before memory is spent."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.limits import check_drafter, check_headroom, max_model_len
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.determinism import needs_single_rows
from dsv4_cluster.engine.freed_memory import give_back_freed_memory, prepare_memory
from dsv4_cluster.engine.memory import MemoryPlan, memory_of, plan_memory
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.model.weight_map import load_packed
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.tokenizer.text import THINK_END, special_token_id
from dsv4_cluster.weights.reader import Checkpoint
from dsv4_kernels.dispatch import choose

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything an engine runs on."""

    config: ModelConfig
    model: Transformer
    layout: KVLayout
    pools: KVPools
    device: torch.device
    max_model_len: int  # prompt + answer limit, tokens
    think_end_token_id: int | None = None  # </think>; None: the checkpoint's tokenizer has no such token
    mtp: MTPModule | None = None  # the draft layer, when speculation is on
    checkpoint_dir: Path | None = None  # holds tokenizer.json, which constrained answers need
    plan: MemoryPlan | None = None  # what was counted before loading
    is_row_by_row: bool = False  # deterministic mode without kernels whose rows are independent


def load_model(
    checkpoint_dir: str | Path,
    engine: EngineConfig,
    kv: KVConfig,
    speculation: SpeculationConfig,
    parallel: ParallelState,
) -> LoadedModel:
    """Open, check, allocate, load. Raises: CheckpointError, ConfigError."""
    checkpoint = Checkpoint.open(checkpoint_dir)
    config = checkpoint.config
    device = torch.device(engine.device)
    dtype = compute_dtype(engine, device)
    num_mtp_layers = int(speculation.max_draft_tokens > 0)
    if num_mtp_layers:
        check_drafter(config, speculation)
        check_headroom(speculation, kv)
        check_mtp(checkpoint, f"speculation.num_draft_tokens is {speculation.num_draft_tokens!r}")
    limit = max_model_len(config, engine, kv)
    layout = KVLayout.build(config, kv, dtype, num_mtp_layers=num_mtp_layers, fingerprint=checkpoint.fingerprint)
    has_arena = device.type == "cpu" and prepare_memory()
    plan = _checked_plan(checkpoint, layout, engine, kv, parallel, dtype, limit, has_arena)
    model = Transformer(
        config, parallel, dtype=dtype, device=device, kv_cache_dtype=kv.kv_cache_dtype, indexer_dtype=kv.indexer_dtype
    )
    load_packed(model, checkpoint, parallel)
    is_row_by_row = needs_single_rows(engine, model, dtype, device)
    mtp = load_mtp(checkpoint, kv, parallel, dtype=dtype, device=device) if num_mtp_layers else None
    pools = KVPools.allocate(layout, kv.num_pages, engine.max_num_seqs, device)
    think_end = special_token_id(checkpoint_dir, THINK_END)
    if device.type == "cpu":
        give_back_freed_memory()  # of the checkpoint's bytes
    return LoadedModel(
        config, model.eval(), layout, pools, device, limit, think_end, mtp, Path(checkpoint_dir), plan, is_row_by_row
    )


def _checked_plan(
    checkpoint: Checkpoint,
    layout: KVLayout,
    engine: EngineConfig,
    kv: KVConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    limit: int,
    has_arena: bool,
) -> MemoryPlan:
    """What loading will take. Raises: ConfigError when it does not fit."""
    device = torch.device(engine.device)
    plan = plan_memory(
        checkpoint.config,
        layout,
        engine,
        kv,
        parallel,
        dtype=dtype,
        max_model_len=limit,
        has_fp4_experts=checkpoint.has_fp4_experts and choose("gemm", device, dtype) == "native",
        has_arena=has_arena,
    )
    plan.check(
        device_bytes=engine.memory_limit_bytes or memory_of(device),
        host_bytes=memory_of(torch.device("cpu")),
        is_shared=device.type == "cpu",
    )
    return plan


def load_mtp(
    checkpoint: Checkpoint, kv: KVConfig, parallel: ParallelState, *, dtype: torch.dtype, device: torch.device
) -> MTPModule:
    """The checkpoint's MTP layer with its weights. Raises: CheckpointError."""
    mtp = MTPModule(checkpoint.config, parallel, dtype=dtype, device=device, kv_cache_dtype=kv.kv_cache_dtype)
    load_packed(mtp, checkpoint, parallel, prefix="mtp.0.")
    return mtp.eval()


def compute_dtype(engine: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; `auto` is bf16, or fp32 on CPUs where torch's bf16 would be slower."""
    if engine.dtype == "auto":
        is_fast = device.type != "cpu" or choose("gemm", device, torch.bfloat16) == "native"
        return torch.bfloat16 if is_fast else torch.float32
    return _DTYPES[engine.dtype]


def check_mtp(checkpoint: Checkpoint, wish: str) -> None:
    """Raises: ConfigError, beginning with `wish`, when the checkpoint has no usable MTP layer."""
    if not checkpoint.has_mtp:
        raise ConfigError(f"{wish}, but the checkpoint has no usable MTP layer")
