"""Build what one rank runs: the engine in its loop, and the transport. Imported in worker processes only (torch)."""

from dataclasses import dataclass

import ray
import torch

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.factory import create_transport
from dsv4_cluster.worker.loop import EngineLoop, LoopCallbacks
from dsv4_cluster.worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The parts of a started rank."""

    loop: EngineLoop
    transport: KVTransport
    layout_id: str
    max_model_len: int


def build_runtime(spec: WorkerSpec, callbacks: LoopCallbacks) -> WorkerRuntime:
    """Load the checkpoint and open the transport; the loop is not started yet.

    Sets the process's torch threads to `engine.num_threads`: Ray would otherwise leave torch one thread per core in
    every worker of the machine. Raises: CheckpointError, ConfigError.
    """
    torch.set_num_threads(spec.role.engine.num_threads)
    tp_size = spec.role.parallel.tp_size
    core = EngineCore.from_checkpoint(
        spec.checkpoint_dir,
        spec.role.engine,
        spec.role.kv,
        spec.speculation,
        parallel=ParallelState(tp_rank=spec.rank, tp_size=tp_size),
    )
    core.load_vocabulary()
    transport = create_transport(spec.transfer, clock=MonotonicClock(), advertise_host=ray.util.get_node_ip_address())
    return WorkerRuntime(EngineLoop(core, callbacks), transport, core.layout_id, core.max_model_len)
