"""Everything a user may write about a cluster, with the checks that need more than one group of settings."""

from typing import Self

from pydantic import Field, model_validator

from dsv4_cluster.config.base import Settings
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.parallel_config import ParallelConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.config.transfer_config import TransferConfig


class ServedModel(Settings):
    """Which checkpoint is served under which names."""

    path: str = Field(description="checkpoint directory; relative paths start at the working directory")
    served_names: tuple[str, ...] = Field(("deepseek-v4",), min_length=1, description="the first is the canonical name")


class WorkerRole(Settings):
    """One role, prefill or decode: how many replicas, what each asks of Ray, and its engine."""

    num_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.1, ge=0, description="Ray CPUs of the replica (it only schedules calls)")
    worker_num_cpus: float = Field(0.1, ge=0, description="Ray CPUs of each rank's worker process")
    worker_num_gpus: float = Field(0.0, ge=0, description="GPUs of each rank's worker process")
    max_ongoing_requests: int = Field(256, ge=1)
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    kv: KVConfig = KVConfig()


class ClusterConfig(Settings):
    """The `args` of the Serve application."""

    model: ServedModel
    prefill: WorkerRole = WorkerRole()
    decode: WorkerRole = WorkerRole()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in ("kv_cache_dtype", "indexer_dtype", "speculation_headroom"):
            ours, theirs = getattr(self.prefill.kv, field), getattr(self.decode.kv, field)
            if ours != theirs:
                raise ValueError(f"prefill.kv.{field} is {ours!r} but decode.kv.{field} is {theirs!r}: they must agree")
        if self.prefill.engine.dtype != self.decode.engine.dtype:
            raise ValueError(
                f"prefill.engine.dtype is {self.prefill.engine.dtype!r} but decode.engine.dtype is "
                f"{self.decode.engine.dtype!r}: they must agree"
            )
        if self.transfer.backend == "local":
            raise ValueError("transfer.backend 'local' moves KV inside one process; a cluster needs 'shm' or 'grpc'")
        return self
