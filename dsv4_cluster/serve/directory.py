"""What one router knows about the replicas of one role: who lives, with which load and layout, and its own calls."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from dsv4_cluster.clock import Clock, MonotonicClock
from dsv4_cluster.errors import LayoutMismatchError, WorkerLostError
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.router.policy import least_loaded

Poll = Callable[[], Awaitable[list[ReplicaSnapshot]]]

logger = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0  # one small call per replica and router; a lost replica is known earlier, by its failing calls
RETRY_PERIOD_S = 0.1  # while a request waits for a replica to come up
NEED_SAME_LAYOUT = "both roles need the same checkpoint, dtype and kv settings"
REPLACE_WAIT_S = 60.0  # how long a request waits for a replacement; covers a process start and a checkpoint load


class ReplicaDirectory:
    """Polls the replicas of one role and picks among the live ones."""

    def __init__(self, role_name: str, poll: Poll, *, clock: Clock | None = None) -> None:
        """poll: asks every replica of the role for a snapshot."""
        self.role_name = role_name
        self._poll = poll
        self._clock = clock or MonotonicClock()
        self._rng = random.Random()
        self._live: dict[str, ReplicaSnapshot] = {}
        self._num_in_flight: dict[str, int] = {}
        self._lost_at_s: dict[str, float] = {}
        self._refreshing = asyncio.Lock()

    async def run(self, on_refresh: Callable[[], None]) -> None:
        """Poll for ever; the caller owns and cancels the task."""
        while True:
            await self.refresh()
            on_refresh()
            await asyncio.sleep(POLL_PERIOD_S)

    async def refresh(self) -> None:
        """Take new snapshots. A poll that fails as a whole leaves nobody live."""
        async with self._refreshing:
            started_s = self._clock.now_s()
            try:
                snapshots = await self._poll()
            except (TimeoutError, RayError, RayServeException) as err:
                logger.debug("no %s snapshots: %r", self.role_name, err)
                snapshots = []
            # A replica lost while the poll was under way stays lost until it answers a later one.
            self._live = {
                snapshot.replica_id: snapshot
                for snapshot in snapshots
                if self._lost_at_s.get(snapshot.replica_id, started_s) <= started_s
            }
            self._lost_at_s = {rid: at_s for rid, at_s in self._lost_at_s.items() if at_s > started_s}

    async def pick(self, layout_ids: frozenset[str] | None = None) -> ReplicaSnapshot:
        """Return the live replica that router/policy.py likes best; wait for one if there is none.

        layout_ids: the cache layouts that will do, None = any.
        Raises: LayoutMismatchError when only other layouts live, WorkerLostError when no replica comes up in time.
        """
        deadline_s = self._clock.now_s() + REPLACE_WAIT_S
        while not self._live:
            if self._clock.now_s() > deadline_s:
                raise WorkerLostError(f"no {self.role_name} replica came up within {REPLACE_WAIT_S:.0f} s")
            await self.refresh()
            if not self._live:
                await asyncio.sleep(RETRY_PERIOD_S)
        fitting = [s for s in self._live.values() if layout_ids is None or s.layout_id in layout_ids]
        if not fitting:
            raise LayoutMismatchError(
                f"{self.role_name} replicas have cache layout {_names(self.layout_ids())}, "
                f"the other side has {_names(layout_ids or frozenset())}: {NEED_SAME_LAYOUT}"
            )
        best = least_loaded(fitting, self._num_in_flight, self._rng)
        assert best is not None, f"{len(fitting)} replicas to choose from, none chosen"
        return best

    def mark_lost(self, replica_id: str) -> None:
        """Forget a replica that failed a call until it answers a new poll."""
        self._lost_at_s[replica_id] = self._clock.now_s()
        self._live.pop(replica_id, None)

    def is_live(self, replica_id: str) -> bool:
        """True when the last poll saw the replica."""
        return replica_id in self._live

    def snapshots(self) -> list[ReplicaSnapshot]:
        """The live replicas as the last poll saw them."""
        return list(self._live.values())

    def layout_ids(self) -> frozenset[str]:
        """Cache layouts of the live replicas."""
        return frozenset(snapshot.layout_id for snapshot in self._live.values())

    @contextmanager
    def in_flight(self, replica_id: str) -> Iterator[None]:
        """Count one call to a replica while the block runs."""
        self._num_in_flight[replica_id] = self._num_in_flight.get(replica_id, 0) + 1
        try:
            yield
        finally:
            self._num_in_flight[replica_id] -= 1
            if not self._num_in_flight[replica_id]:
                del self._num_in_flight[replica_id]


def missing_replicas(*roles: ReplicaDirectory) -> list[str]:
    """What the live replicas of the roles lack to serve a request together, one sentence each; empty = nothing."""
    missing = [f"no {role.role_name} replica is up" for role in roles if not role.layout_ids()]
    if missing or frozenset.intersection(*[role.layout_ids() for role in roles]):
        return missing
    layouts = ", ".join(f"{role.role_name} replicas have cache layout {_names(role.layout_ids())}" for role in roles)
    return [f"{layouts}: {NEED_SAME_LAYOUT}"]


def _names(layout_ids: frozenset[str]) -> str:
    return " and ".join(sorted(layout_ids)) or "none"
