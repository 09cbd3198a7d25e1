"""One batch on its way from `validating` to its end, on the router that holds its claim."""

import asyncio
import logging
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

from dsv4_cluster.batches.claim import AnswerLine, BatchClaim
from dsv4_cluster.batches.record import BatchFault
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import DeadlineExceededError, Dsv4Error, OverloadedError
from dsv4_cluster.frontend.batch_lines import RequestLine, answer_line, check_lines, parse_line, unanswered_line
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.direct_call import DirectAnswer, DirectCalls

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.5  # a cancellation is seen, and progress shown, this late
LINES_PER_READ, LINES_PER_WRITE = 64, 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between two tries of a line
_REASONS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "this request was not answered within the completion window"),
}
T = TypeVar("T")
Stop = Literal["cancelled", "expired", "draining"]


class BatchRun:
    """Answers the lines that have no answer yet, many at a time, and closes the batch.

    All file work is done by one thread in the order in which it is asked for, so the claim goes after the last write.
    """

    def __init__(
        self,
        claim: BatchClaim,
        config: RouterConfig,
        calls: DirectCalls,
        slots: asyncio.Semaphore,
        *,
        caller: Caller | None,
        is_draining: Callable[[], bool],
        on_line: Callable[[int], None],
    ) -> None:
        """slots: shared by all batches of this router. caller: whose lines these are, None when the key is gone.

        on_line: hears the status of every line that has its answer.
        """
        self._claim = claim
        self._config = config
        self._calls = calls
        self._slots = slots
        self._caller = caller
        self._is_draining = is_draining
        self._on_line = on_line
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._stop: Stop | None = None
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[AnswerLine] = []  # to be written
        self._writing = asyncio.Lock()
        self._num_completed = self._num_failed = 0

    async def run(self) -> None:
        """To the end of the batch, or until this router drains or is cancelled. Raises: OSError."""
        try:
            await self._run()
        finally:
            self._thread.submit(self._claim.release)
            self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        claim, batch_id = self._claim, self._claim.record.batch_id
        if self._caller is None:
            message = f"the API key {claim.record.key_name!r}, which asked for this batch, is not known any more"
            await self._off_loop(lambda: claim.finish("failed", [BatchFault(code="invalid_api_key", message=message)]))
            return
        if "in_progress" not in claim.record.reached_s and not await self._off_loop(self._validated):
            logger.info("%s: failed, its file is not valid", batch_id)
            return
        logger.info("%s: answering %d requests", batch_id, claim.record.num_total)
        await self._answer_all(self._caller)
        if self._stop == "draining":
            logger.info("%s: left to another router or another start", batch_id)
            return
        reason = self._stop
        await self._off_loop(lambda: self._close(reason))
        logger.info("%s: %s", batch_id, claim.record.status)

    def _validated(self) -> bool:
        """Reach in_progress, or the end. In the thread."""
        claim, config = self._claim, self._config
        num_lines, faults = check_lines(
            claim.input_lines(),
            claim.record.endpoint,
            max_lines=config.batches.max_lines_per_file,
            max_body_bytes=config.max_body_bytes,
        )
        if faults:
            claim.finish("failed", faults)
        else:
            claim.enter("in_progress", num_total=num_lines)
        return not faults

    def _close(self, reason: Stop | None) -> None:
        """Give every line that has no answer the reason, and end the batch. In the thread."""
        claim = self._claim
        if reason is not None:
            answered = claim.answered().custom_ids
            left = (line.custom_id for line in self._lines() if line.custom_id not in answered)
            while ids := list(islice(left, LINES_PER_WRITE)):
                claim.append([unanswered_line(custom_id, *_REASONS[reason]) for custom_id in ids])
        claim.enter("finalizing")
        claim.finish("completed" if reason is None else "expired" if reason == "expired" else "cancelled")

    async def _answer_all(self, caller: Caller) -> None:
        """Until the last line, or `_stop`."""
        room = asyncio.Semaphore(self._config.batches.max_concurrent_lines)  # this batch's lines in memory
        await self._look()
        async with asyncio.TaskGroup() as outer:
            watch = outer.create_task(self._watch())
            async with asyncio.TaskGroup() as group, aclosing(self._unanswered()) as lines:
                async for line in lines:
                    await room.acquire()
                    if self._stop is not None:
                        break
                    task = group.create_task(self._answer(line, caller))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    task.add_done_callback(lambda _: room.release())
            watch.cancel()

    async def _answer(self, line: RequestLine, caller: Caller) -> None:
        num_tries = num_lost = 0
        while self._stop is None:
            async with self._slots:
                if self._stop is not None:
                    return
                answer = await self._calls.post(self._claim.record.endpoint, line.body, caller)
            num_tries += 1
            num_lost += not isinstance(answer.failure, OverloadedError)
            if not self._may_retry(answer.failure, num_lost):
                await self._write(line, answer)
                self._on_line(answer.status)
                return
            await self._pause(answer.failure, num_tries)

    def _may_retry(self, failure: Dsv4Error | None, num_lost: int) -> bool:
        """No room is no failure of a line, which waits as long as the batch may. Lost work is tried a few times."""
        if isinstance(failure, OverloadedError):
            return True
        if failure is None or not (failure.retryable or isinstance(failure, DeadlineExceededError)):
            return False
        return self._is_draining() or num_lost < self._config.max_attempts

    async def _pause(self, failure: Dsv4Error | None, num_tries: int) -> None:
        """Wait longer with every try, and as long as the error says; ends early when the batch stops."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_tries - 1, 16)) * random.uniform(0.5, 1.5)
        asked_s = getattr(failure, "retry_after_s", None) or 0.0
        try:
            async with asyncio.timeout(max(pause_s, asked_s)):
                await self._stopped.wait()
        except TimeoutError:
            return

    async def _write(self, line: RequestLine, answer: DirectAnswer) -> None:
        """Add the answer to those that wait for the disk; whoever gets the lock writes all of them with one fsync."""
        text = answer_line(line.custom_id, status=answer.status, request_id=answer.request_id, body=answer.body)
        self._waiting.append(text)
        try:
            async with self._writing:
                lines = self._take_waiting()
                if not lines:
                    return
                await self._off_loop(lambda: self._claim.append(lines))
                num_failed = sum(one.is_error for one in lines)
                self._num_failed += num_failed
                self._num_completed += len(lines) - num_failed
        except asyncio.CancelledError:
            left = self._take_waiting()
            if left:  # they were computed: written before the claim goes, or, should that fail, computed again
                self._thread.submit(self._claim.append, left)
            raise

    def _take_waiting(self) -> list[AnswerLine]:
        lines, self._waiting = self._waiting, []
        return lines

    async def _watch(self) -> None:
        """Look for reasons to stop, and show progress."""
        while self._stop is None:
            await asyncio.sleep(WATCH_PERIOD_S)
            await self._look()
            record = self._claim.record
            if (record.num_completed, record.num_failed) != (self._num_completed, self._num_failed):
                save = partial(self._claim.save, num_completed=self._num_completed, num_failed=self._num_failed)
                await self._off_loop(save)

    async def _look(self) -> None:
        """Set `_stop` when there is a reason. Draining lets lines under way end; otherwise they are aborted."""
        asked_s = await self._off_loop(lambda: self._claim.cancel_asked_s)
        if asked_s is not None:
            self._stop = "cancelled"
        elif time.time() >= self._claim.record.expires_s:
            self._stop = "expired"
        elif self._is_draining():
            self._stop = "draining"
        else:
            return
        self._stopped.set()
        if self._stop != "draining":
            for task in self._tasks:
                task.cancel()

    async def _unanswered(self) -> AsyncGenerator[RequestLine, None]:
        """The lines to run, read as they are needed."""
        answered = await self._off_loop(self._claim.answered)
        self._num_completed, self._num_failed = answered.num_completed, answered.num_failed
        lines = self._lines()
        while piece := await self._off_loop(lambda: list(islice(lines, LINES_PER_READ))):
            for line in piece:
                if line.custom_id not in answered.custom_ids:
                    yield line

    def _lines(self) -> Iterator[RequestLine]:
        """All lines, which are known to be valid; the size limit may be another one by now. In the thread."""
        endpoint = self._claim.record.endpoint
        return (parse_line(text, endpoint, sys.maxsize) for _, text in self._claim.input_lines())

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
