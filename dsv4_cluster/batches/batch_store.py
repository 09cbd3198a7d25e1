"""Batches of tenants on disk, shared by routers: each is run by one of them at a time. Every call blocks."""

import dataclasses
import fcntl
import os
import shutil
import time
from pathlib import Path

from dsv4_cluster.batches.claim import CANCEL_FILE, INPUT_FILE, RECORD_FILE, BatchClaim, time_in
from dsv4_cluster.batches.durable import PART_PREFIX, part_of, sync_directory, write_durably
from dsv4_cluster.batches.file_store import ABANDONED_S, FileStore
from dsv4_cluster.batches.layout import BATCH_PREFIX, is_id, make_directories, page_of, tenant_name
from dsv4_cluster.batches.record import BatchRecord
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.errors import OverloadedError


class BatchStore:
    """Who runs a batch holds the kernel's lock (flock) on its marker, so the death of a router frees it at once."""

    def __init__(self, root: Path, files: FileStore, config: BatchesConfig) -> None:
        """Raises: OSError when the directory cannot be made."""
        _, self._batches, self._active = make_directories(root)
        self._files = files
        self._config = config

    def create(self, record: BatchRecord) -> bool:
        """Take a batch in, with a link to its input, so that the file may be deleted. Returns: False without the file.

        Raises: OverloadedError when the tenant has too many batches under way, OSError.
        """
        self._make_room(record.tenant)
        directory = self._directory(record.tenant, record.batch_id)
        directory.mkdir(parents=True)
        try:
            os.link(self._files.contents(record.tenant, record.input_file_id), directory / INPUT_FILE)
        except FileNotFoundError:
            directory.rmdir()
            return False
        marker = self._marker(record.tenant, record.batch_id)
        part = part_of(marker)
        # The marker is locked before it has its name: nobody takes a batch that is not written yet.
        lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            part.rename(marker)
            sync_directory(self._active)
            write_durably(directory / RECORD_FILE, record.to_json())
            sync_directory(directory.parent)
        finally:
            os.close(lock)
        return True

    def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """The state, `cancelling` from the moment that was asked for. Raises: Dsv4Error when it is damaged, OSError."""
        if not is_id(batch_id, BATCH_PREFIX):
            return None
        directory = self._directory(tenant, batch_id)
        record = BatchRecord.read(directory / RECORD_FILE)
        if record is None:
            return None
        asked_s = time_in(directory / CANCEL_FILE)
        if record.is_over or asked_s is None:
            return record
        return dataclasses.replace(record, status="cancelling", reached_s={**record.reached_s, "cancelling": asked_s})

    def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Batches, newest first. Returns: (page, whether there are more). Raises: OSError."""
        page, has_more = page_of(self._ids(tenant), after=after, limit=limit, is_ascending=False)
        found = [self.get(tenant, batch_id) for batch_id in page]
        return [record for record in found if record is not None], has_more

    def ask_to_cancel(self, tenant: str, batch_id: str) -> None:
        """Whoever runs the batch ends it; one that is over stays as it is. The batch exists. Raises: OSError."""
        path = self._directory(tenant, batch_id) / CANCEL_FILE
        if not path.exists():
            write_durably(path, str(int(time.time())).encode())

    def unfinished(self) -> list[tuple[str, str]]:
        """(tenant, batch id) of all batches that are not over, oldest first, whoever runs them. Raises: OSError."""
        names = sorted(name for name in os.listdir(self._active) if not name.startswith(PART_PREFIX))
        return [(tenant.removeprefix("t-"), batch_id) for batch_id, _, tenant in (n.partition(".") for n in names)]

    def claim(self, tenant: str, batch_id: str) -> BatchClaim | None:
        """Take a batch over. Returns: None when another process has it or it is over. Raises: Dsv4Error, OSError."""
        marker = self._marker(tenant, batch_id)
        try:
            lock = os.open(marker, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = self._record_behind(lock, tenant, batch_id)
        except BlockingIOError:
            record = None
        except BaseException:
            os.close(lock)
            raise
        if record is None:
            os.close(lock)
            return None
        return BatchClaim(record, self._directory(tenant, batch_id), marker, lock, self._files)

    def _record_behind(self, lock: int, tenant: str, batch_id: str) -> BatchRecord | None:
        """The state of a batch whose marker is locked, or None when there is nothing to do."""
        if os.fstat(lock).st_nlink == 0:
            return None  # its last owner finished it between our open and our lock
        record = self.get(tenant, batch_id)
        if record is not None and not record.is_over:
            return record
        directory = self._directory(tenant, batch_id)
        if record is None:  # a crash in `create`, which has told nobody
            shutil.rmtree(directory, ignore_errors=True)
        (directory / INPUT_FILE).unlink(missing_ok=True)
        self._marker(tenant, batch_id).unlink()
        return None

    def _make_room(self, tenant: str) -> None:
        """Raises: OverloadedError with the limit."""
        ids, limit = sorted(self._ids(tenant)), self._config.max_batches_per_tenant
        num_extra = len(ids) + 1 - limit
        for batch_id in ids:
            if num_extra <= 0:
                return
            record, directory = self.get(tenant, batch_id), self._directory(tenant, batch_id)
            if _is_abandoned(directory) if record is None else record.is_over:
                shutil.rmtree(directory, ignore_errors=True)
                num_extra -= 1
        if num_extra > 0:
            raise OverloadedError(f"{len(ids)} batches are under way, router.batches.max_batches_per_tenant is {limit}")

    def _ids(self, tenant: str) -> list[str]:
        directory = self._batches / tenant_name(tenant)
        return os.listdir(directory) if directory.is_dir() else []

    def _directory(self, tenant: str, batch_id: str) -> Path:
        return self._batches / tenant_name(tenant) / batch_id

    def _marker(self, tenant: str, batch_id: str) -> Path:
        return self._active / f"{batch_id}.{tenant_name(tenant)}"


def _is_abandoned(directory: Path) -> bool:
    """True for what a crash in `create` left."""
    try:
        return time.time() - directory.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:
        return False
