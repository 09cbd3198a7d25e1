"""What a worker process is told at creation and what it tells back: plain data, free of torch."""

from dataclasses import dataclass

from dsv4_cluster.config.cluster_config import WorkerRole
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.protocol.stats import EngineStats

STEP_LIMIT_S = 300.0  # a step that runs longer counts as hung; the slowest CPU prefill step measured stays far below


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything one rank needs to build its engine and its transport."""

    role_name: str  # "prefill" | "decode"
    checkpoint_dir: str
    role: WorkerRole
    transfer: TransferConfig
    speculation: SpeculationConfig
    rank: int = 0
    step_limit_s: float = STEP_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Fixed facts of a started worker."""

    rank: int
    pid: int
    node_id: str
    layout_id: str
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life. A busy worker answers too: the engine runs in another thread."""

    rank: int
    busy_s: float  # since the running step began, 0 when idle
    last_step_age_s: float | None  # None before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAudit:
    """What a worker holds, after its engine's accounting was checked."""

    rank: int
    stats: EngineStats
    num_leases: int  # payloads published and neither fetched nor expired
