"""The response store of one process: bounded in entries, bytes and time, least recently used first out."""

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.responses_config import ResponsesConfig
from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.frontend.response_object import lost_body
from dsv4_cluster.protocol.stored_response import StoredResponse

logger = logging.getLogger(__name__)

WATCH_GRACE_S = 30.0  # a response under way that nobody has waited for this long has lost its router
Key = tuple[str, str]  # tenant, response id


class _Entry:
    def __init__(self, record: StoredResponse, now_s: float) -> None:
        self.record = record
        self.used_s = now_s
        self.watched_s = now_s
        self.num_watchers = 0
        self.over = asyncio.Event()


class LocalResponseStore:
    """A ResponseStore. Belongs to one event loop."""

    def __init__(self, config: ResponsesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # the least recently used one first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def add(self, record: StoredResponse) -> None:
        """See ResponseStore. A response larger than the whole store is not kept."""
        self._drop_expired()
        if record.num_bytes > self._config.max_bytes or self._config.max_entries == 0:
            logger.warning("%s: %d bytes are too many for the response store", record.response_id, record.num_bytes)
            return
        self._drop(_key(record))
        self._make_room(record.num_bytes, 1)
        self._entries[_key(record)] = _Entry(record, self._clock.now_s())
        self.num_bytes += record.num_bytes

    async def replace(self, record: StoredResponse) -> bool:
        """See ResponseStore."""
        entry = self._entries.get(_key(record))
        if entry is None or entry.record.is_over:
            return False
        self.num_bytes += record.num_bytes - entry.record.num_bytes
        entry.record = record
        if record.is_over:
            entry.over.set()
        self._touch(_key(record), entry)
        try:
            self._make_room(0, 0)
        except OverloadedError as err:
            logger.warning("%s: %s", record.response_id, err)
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        self._drop_expired()
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            return None
        self._touch((tenant, response_id), entry)
        if not entry.record.is_over and not self._is_watched(entry):
            lost = dataclasses.replace(entry.record, body=lost_body(entry.record.body), is_over=True)
            await self.replace(lost)
        return entry.record

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        self._drop_expired()
        return self._drop((tenant, response_id))

    async def wait_until_over(self, tenant: str, response_id: str, timeout_s: float) -> bool:
        """See ResponseStore."""
        entry = self._entries.get((tenant, response_id))
        if entry is None or entry.record.is_over:
            return True
        with self._watching(entry):
            try:
                async with asyncio.timeout(timeout_s):
                    await entry.over.wait()
            except TimeoutError:
                return False
        return True

    @contextmanager
    def _watching(self, entry: _Entry) -> Iterator[None]:
        entry.num_watchers += 1
        try:
            yield
        finally:
            entry.num_watchers -= 1
            entry.watched_s = self._clock.now_s()

    def _is_watched(self, entry: _Entry) -> bool:
        return entry.num_watchers > 0 or self._clock.now_s() - entry.watched_s < WATCH_GRACE_S

    def _touch(self, key: Key, entry: _Entry) -> None:
        entry.used_s = self._clock.now_s()
        self._entries.move_to_end(key)

    def _drop_expired(self) -> None:
        """Those under way stay: they are bounded by the time limit of their generation."""
        limit_s = self._clock.now_s() - self._config.ttl_s
        old = []
        for key, entry in self._entries.items():
            if entry.used_s > limit_s:
                break
            if entry.record.is_over or not self._is_watched(entry):
                old.append(key)
        for key in old:
            self._drop(key)

    def _make_room(self, num_bytes: int, num_entries: int) -> None:
        """Drop what was used longest ago and is over. Raises: OverloadedError."""
        if self._fits(num_bytes, num_entries):
            return
        for key in [key for key, entry in self._entries.items() if entry.record.is_over]:
            self._drop(key)
            if self._fits(num_bytes, num_entries):
                return
        raise OverloadedError(
            f"the response store is full of responses under way: {len(self._entries)} with {self.num_bytes} bytes, "
            f"the limits are {self._config.max_entries} and {self._config.max_bytes}"
        )

    def _fits(self, num_bytes: int, num_entries: int) -> bool:
        return (
            self.num_bytes + num_bytes <= self._config.max_bytes
            and len(self._entries) + num_entries <= self._config.max_entries
        )

    def _drop(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= entry.record.num_bytes
        entry.over.set()
        return True


def _key(record: StoredResponse) -> Key:
    return (record.tenant, record.response_id)
