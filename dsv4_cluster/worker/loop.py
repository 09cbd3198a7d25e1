"""The thread that owns an EngineCore: it takes commands, runs steps and hands out results.

Nothing else touches the engine, so the engine needs no locks. While there is work the thread steps and takes commands
in between; without work it sleeps until a command arrives.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.stats import EngineStats

logger = logging.getLogger(__name__)
T = TypeVar("T")

HOUSEKEEPING_PERIOD_S = 1.0  # how often expired leases are looked for; leases last tens of seconds


@dataclass(frozen=True, slots=True)
class LoopCallbacks:
    """Called from the engine thread; each must return quickly and never raise."""

    on_chunks: Callable[[Sequence[TokenChunk]], object]  # once per step that produced something
    on_step: Callable[[], object]  # after every step: pages may have become free
    on_failure: Callable[[BaseException], object]  # once; the loop has ended
    housekeeping: Callable[[], object]


@dataclass(slots=True)
class _Command(Generic[T]):
    run: Callable[[EngineCore], T]
    result: "Future[T]" = field(default_factory=Future)


class EngineLoop:
    """Runs one engine in one daemon thread."""

    def __init__(self, core: EngineCore, callbacks: LoopCallbacks) -> None:
        self._core = core
        self._callbacks = callbacks
        self._clock = MonotonicClock()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # orders `submit` against the end of the loop: no command is left unanswered
        self._ended: BaseException | None = None
        self._busy_since_s: float | None = None
        self._last_step_at_s: float | None = None
        self._next_housekeeping_s = self._clock.now_s()
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the current step; commands that wait fail with WorkerLostError."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def submit(self, run: Callable[[EngineCore], T]) -> "Future[T]":
        """Run `run(core)` in the engine thread between two steps. Raises through the future what `run` raises."""
        command: _Command[T] = _Command(run)
        with self._lock:
            if self._ended is None:
                self._commands.put(command)
                return command.result
        command.result.set_exception(WorkerLostError(f"the engine loop has ended: {self._ended}"))
        return command.result

    @property
    def failure(self) -> BaseException | None:
        """Why the loop ended, None while it runs."""
        return self._ended

    @property
    def stats(self) -> EngineStats:
        """Counters after the last step or command; never waits for the engine."""
        return self._stats

    def busy_s(self) -> float:
        """Seconds since the running step or command began, 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s

    def last_step_age_s(self) -> float | None:
        """Seconds since the last finished step, None before the first."""
        at_s = self._last_step_at_s
        return None if at_s is None else self._clock.now_s() - at_s

    def _run(self) -> None:
        reason: BaseException = WorkerLostError("the worker shuts down")
        failed = False
        try:
            while self._take_commands():
                if self._core.has_work():
                    self._step()
                self._housekeep_if_due()
        except Exception as err:
            # Boundary of the thread: whatever the engine raised ends this worker, and the gang replaces it.
            logger.exception("engine loop failed")
            reason, failed = err, True
        self._end(reason)
        if failed:
            self._callbacks.on_failure(reason)

    def _take_commands(self) -> bool:
        """Run every waiting command; sleep for one when the engine is idle. Returns: False when asked to stop."""
        wait_s = 0.0 if self._core.has_work() else HOUSEKEEPING_PERIOD_S
        while True:
            try:
                command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            wait_s = 0.0
            self._answer(command)

    def _answer(self, command: _Command) -> None:
        if not command.result.set_running_or_notify_cancel():
            return
        self._busy_since_s = self._clock.now_s()
        try:
            result = command.run(self._core)
        except Exception as err:
            command.result.set_exception(err)
        else:
            command.result.set_result(result)
        finally:
            self._busy_since_s = None
            self._stats = self._core.stats()

    def _step(self) -> None:
        self._busy_since_s = self._clock.now_s()
        try:
            output = self._core.step()
        finally:
            self._busy_since_s = None
        self._last_step_at_s = self._clock.now_s()
        self._stats = self._core.stats()
        if output.chunks:
            self._callbacks.on_chunks(output.chunks)
        self._callbacks.on_step()

    def _housekeep_if_due(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._next_housekeeping_s:
            self._next_housekeeping_s = now_s + HOUSEKEEPING_PERIOD_S
            self._callbacks.housekeeping()

    def _end(self, reason: BaseException) -> None:
        with self._lock:
            self._ended = reason
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command.result.set_exception(WorkerLostError(f"the engine loop has ended: {reason}"))
