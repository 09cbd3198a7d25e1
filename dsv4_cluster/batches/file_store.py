"""Files of tenants on disk. Every call blocks: the front end makes them in threads."""

import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsv4_cluster.batches.durable import PART_PREFIX, part_of, sync_directory, write_durably
from dsv4_cluster.batches.layout import FILE_PREFIX, is_id, make_directories, new_id, page_of, tenant_name
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.errors import OverloadedError

ABANDONED_S = 3600.0  # an upload that was not finished after this long never will be


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What is known about a file beside its contents."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int  # Unix time


class FileStore:
    """Contents first, then the description: a file exists once it is described. Processes may share the directory."""

    def __init__(self, root: Path, config: BatchesConfig) -> None:
        """Raises: OSError when the directory cannot be made."""
        self._files, _, _ = make_directories(root)
        self._config = config

    def add(self, tenant: str, source: BinaryIO, *, filename: str, purpose: str) -> StoredFile:
        """Store a copy of `source`, read from where it stands. Raises: OverloadedError at a limit, OSError."""
        directory = self._files / tenant_name(tenant)
        directory.mkdir(exist_ok=True)
        self._check_room(directory)
        file_id = new_id(FILE_PREFIX)
        path = self.contents(tenant, file_id)
        part = part_of(path)
        try:
            with part.open("xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return self.describe(tenant, file_id, filename=filename, purpose=purpose)

    def describe(self, tenant: str, file_id: str, *, filename: str, purpose: str) -> StoredFile:
        """Make contents that lie in place a file; again is harmless. Raises: OSError."""
        path = self.contents(tenant, file_id)
        stored = StoredFile(
            file_id=file_id,
            filename=filename,
            purpose=purpose,
            num_bytes=path.stat().st_size,
            created_s=int(time.time()),
        )
        write_durably(path.with_suffix(".json"), json.dumps(dataclasses.asdict(stored)).encode())
        return stored

    def get(self, tenant: str, file_id: str) -> StoredFile | None:
        """The description. Raises: OSError."""
        if not is_id(file_id, FILE_PREFIX):
            return None
        try:
            return StoredFile(**json.loads(self.contents(tenant, file_id).with_suffix(".json").read_bytes()))
        except FileNotFoundError:
            return None

    def open(self, tenant: str, file_id: str) -> BinaryIO | None:
        """The contents, to be closed by the caller; they stay readable when the file is deleted. Raises: OSError."""
        if self.get(tenant, file_id) is None:
            return None
        try:
            return self.contents(tenant, file_id).open("rb")
        except FileNotFoundError:
            return None

    def page(
        self, tenant: str, *, after: str | None, limit: int, is_ascending: bool, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Files by age. Returns: (page, whether there are more). Raises: OSError."""
        ids = self._ids(tenant)
        if purpose is not None:
            ids = [one for one in ids if (stored := self.get(tenant, one)) is not None and stored.purpose == purpose]
        page, has_more = page_of(ids, after=after, limit=limit, is_ascending=is_ascending)
        found = [self.get(tenant, file_id) for file_id in page]
        return [stored for stored in found if stored is not None], has_more

    def delete(self, tenant: str, file_id: str) -> bool:
        """Forget a file; False when there is none. Batches that run on it go on. Raises: OSError."""
        if not is_id(file_id, FILE_PREFIX):
            return False
        path = self.contents(tenant, file_id)
        try:
            path.with_suffix(".json").unlink()
        except FileNotFoundError:
            return False
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
        return True

    def contents(self, tenant: str, file_id: str) -> Path:
        """Where the contents lie, or will."""
        return self._files / tenant_name(tenant) / f"{file_id}.jsonl"

    def _ids(self, tenant: str) -> list[str]:
        directory = self._files / tenant_name(tenant)
        if not directory.is_dir():
            return []
        return [path.stem for path in directory.glob(f"{FILE_PREFIX}*.json")]

    def _check_room(self, directory: Path) -> None:
        """Raises: OverloadedError with the limit. Removes what uploads left that were cut off."""
        num_files = num_bytes = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # deleted meanwhile
                if entry.name.startswith(PART_PREFIX) and time.time() - status.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink(missing_ok=True)
                    continue
                num_bytes += status.st_size
                num_files += entry.name.endswith(".json")
        config = self._config
        if num_files >= config.max_files_per_tenant:
            raise OverloadedError(
                f"{num_files} files are stored, router.batches.max_files_per_tenant is {config.max_files_per_tenant}; "
                "delete some"
            )
        if num_bytes >= config.max_bytes_per_tenant:
            raise OverloadedError(
                f"{num_bytes} bytes are stored, router.batches.max_bytes_per_tenant is {config.max_bytes_per_tenant}; "
                "delete some files"
            )
