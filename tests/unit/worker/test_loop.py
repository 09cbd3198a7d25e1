"""The engine thread, around a real engine on the toy checkpoint."""

import threading
from collections.abc import Iterator

import pytest
import torch

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.errors import InvalidRequestError, WorkerLostError
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StopParams
from dsv4_cluster.transfer.factory import create_transport
from dsv4_cluster.worker.loop import EngineLoop, LoopCallbacks

WAIT_S = 30.0


class Recorder:
    """Collects what the loop reports."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.finished = threading.Event()
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        self.housekept = threading.Event()

    def callbacks(self) -> LoopCallbacks:
        return LoopCallbacks(self._take, lambda: None, self._fail, self.housekept.set)

    def _take(self, chunks) -> None:
        self.chunks += chunks
        if any(chunk.finish_reason for chunk in chunks):
            self.finished.set()

    def _fail(self, err: BaseException) -> None:
        self.failures.append(err)
        self.failed.set()


@pytest.fixture(scope="module")
def core(toy_dir) -> EngineCore:
    return EngineCore.from_checkpoint(toy_dir, EngineConfig(), KVConfig(num_pages=8), SpeculationConfig())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def loop(core, recorder) -> Iterator[EngineLoop]:
    loop = EngineLoop(core, recorder.callbacks())
    loop.start()
    yield loop
    loop.stop(WAIT_S)


def request(request_id: str = "r", max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
        stop=StopParams(ignore_eos=True),
    )


def test_a_request_is_stepped_to_its_end_without_further_calls(loop, recorder):
    loop.submit(lambda core: core.add(request())).result(WAIT_S)

    assert recorder.finished.wait(WAIT_S)
    assert sum(len(chunk.token_ids) for chunk in recorder.chunks) == 5
    assert loop.submit(lambda core: core.check()).result(WAIT_S) is None


def test_commands_run_between_steps_of_a_busy_engine(loop, recorder):
    loop.submit(lambda core: core.add(request("long", max_tokens=1500))).result(WAIT_S)

    assert loop.submit(lambda core: core.abort("long")).result(WAIT_S)

    assert loop.submit(lambda core: core.stats().free_pages).result(WAIT_S) == 8
    assert not recorder.finished.is_set()


def test_what_a_command_raises_reaches_its_caller_and_the_loop_goes_on(loop):
    refused = loop.submit(lambda core: core.add(request(max_tokens=0)))

    with pytest.raises(InvalidRequestError):
        refused.result(WAIT_S)
    assert loop.failure is None
    assert loop.submit(lambda core: core.has_work()).result(WAIT_S) is False


def test_housekeeping_runs_on_an_idle_engine(loop, recorder):
    assert recorder.housekept.wait(WAIT_S)


def test_a_payload_that_nobody_fetches_goes_with_its_lease_on_an_idle_engine(core):
    """A router that dies right after its prefill leaves such a payload behind."""
    clock = ManualClock()
    config = TransferConfig(backend="local", lease_s=60)
    transport = create_transport(config, clock=clock)
    segment = LiveSegment(
        pool="window", layer_start=0, layer_end=1, num_rows=1, data=torch.zeros(64, dtype=torch.uint8)
    )
    transport.publish(request_id="r", epoch=0, layout_id="L", num_tokens=1, segments=[segment])
    swept = threading.Event()
    callbacks = LoopCallbacks(lambda _: None, lambda: None, lambda _: None, lambda: transport.sweep() and swept.set())
    loop = EngineLoop(core, callbacks)

    loop.start()
    clock.advance(59.0)
    is_early = swept.wait(0.1)
    clock.advance(1.0)

    assert swept.wait(WAIT_S) and not is_early
    assert (transport.num_leases, transport.num_staged_bytes) == (0, 0)
    loop.stop(WAIT_S)


def test_a_failing_step_ends_the_loop_and_answers_everybody(core, recorder):
    class FailingCore(EngineCore):
        """The real engine, until it steps."""

        def step(self):
            raise RuntimeError("device lost")

    failing = FailingCore.__new__(FailingCore)
    failing.__dict__.update(core.__dict__)
    loop = EngineLoop(failing, recorder.callbacks())
    loop.start()

    loop.submit(lambda core: core.add(request("doomed"))).result(WAIT_S)

    assert recorder.failed.wait(WAIT_S)
    assert "device lost" in str(recorder.failures[0])
    with pytest.raises(WorkerLostError, match="device lost"):
        loop.submit(lambda core: core.stats()).result(WAIT_S)
    core.abort("doomed")


def test_a_stopped_loop_refuses_commands(core, recorder):
    loop = EngineLoop(core, recorder.callbacks())
    loop.start()

    loop.stop(WAIT_S)

    with pytest.raises(WorkerLostError, match="shuts down"):
        loop.submit(lambda core: core.stats()).result(WAIT_S)
    assert recorder.failures == []
