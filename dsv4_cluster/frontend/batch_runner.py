"""The batches of one router: takes those that nobody runs, from the directory that all routers share."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from dsv4_cluster.batches.batch_store import BatchStore
from dsv4_cluster.batches.claim import BatchClaim
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import Dsv4Error
from dsv4_cluster.frontend.batch_run import BatchRun
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.direct_call import DirectCalls
from dsv4_cluster.metrics.batch_metrics import BatchMetrics

logger = logging.getLogger(__name__)

SCAN_PERIOD_S = 0.5  # a batch of another router that died is taken over this late
RETRY_AFTER_S = 30.0  # a batch that stopped by an error of ours or of the disk


class BatchRunner:
    """Belongs to one event loop; the app starts and closes it."""

    def __init__(
        self,
        store: BatchStore,
        config: RouterConfig,
        calls: DirectCalls,
        *,
        caller_of: Callable[[str, str], Caller | None],
        is_draining: Callable[[], bool],
        metrics: BatchMetrics,
    ) -> None:
        """caller_of: who has the key of this name in this tenant, with a batch's priority; None when nobody has."""
        self._store = store
        self._config = config
        self._calls = calls
        self._caller_of = caller_of
        self._is_draining = is_draining
        self._metrics = metrics
        self._slots = asyncio.Semaphore(config.batches.max_concurrent_lines)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}  # by tenant and batch id
        self._not_before_s: dict[tuple[str, str], float] = {}  # monotonic
        self._wake = asyncio.Event()
        self._scanner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take batches."""
        self._scanner = asyncio.get_running_loop().create_task(self._scan())

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    @property
    def has_ended(self) -> bool:
        """True when this router takes no batches any more, by an error that nobody foresaw."""
        return self._scanner is not None and self._scanner.done()

    async def close(self) -> None:
        """Stop at once. Requests under way are aborted; whoever takes their batch asks again."""
        tasks = [task for task in (self._scanner, *self._running.values()) if task is not None]
        self._scanner = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _scan(self) -> None:
        while True:
            try:
                await self._take()
            except OSError as err:
                logger.error("the directory of batches cannot be read: %s", err)
            try:
                async with asyncio.timeout(SCAN_PERIOD_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _take(self) -> None:
        """Start what there is room for; tenants with fewer batches under way come first."""
        if self._is_draining():
            return
        unfinished = await asyncio.to_thread(self._store.unfinished)
        self._not_before_s = {key: at for key, at in self._not_before_s.items() if key in set(unfinished)}
        while len(self._running) < self._config.batches.max_concurrent_batches:
            num_running = Counter(tenant for tenant, _ in self._running)
            free = [key for key in unfinished if key not in self._running and self._is_due(key)]
            if not free:
                return
            key = min(free, key=lambda one: num_running[one[0]])  # the oldest of them, by the order of `unfinished`
            unfinished.remove(key)
            try:
                claim = await asyncio.to_thread(self._store.claim, *key)
            except (OSError, Dsv4Error) as err:
                self._put_off(key, err)
                continue
            if claim is not None:
                self._running[key] = asyncio.get_running_loop().create_task(self._run(key, claim))
                self._metrics.set_under_way(len(self._running))

    def _put_off(self, key: tuple[str, str], err: Exception) -> None:
        logger.error("%s: stopped, and tried again in %.0f s", key[1], RETRY_AFTER_S, exc_info=err)
        self._not_before_s[key] = time.monotonic() + RETRY_AFTER_S

    def _is_due(self, key: tuple[str, str]) -> bool:
        return self._not_before_s.get(key, 0.0) <= time.monotonic()

    async def _run(self, key: tuple[str, str], claim: BatchClaim) -> None:
        """The boundary of a batch: whatever stops it is logged, and it is tried again later."""
        record = claim.record
        run = BatchRun(
            claim,
            self._config,
            self._calls,
            self._slots,
            caller=self._caller_of(record.key_name, record.tenant),
            is_draining=self._is_draining,
            on_line=self._metrics.count_line,
        )
        try:
            await run.run()
        except Exception as err:
            self._put_off(key, err)
        finally:
            del self._running[key]
            self._metrics.set_under_way(len(self._running))
            self._wake.set()
