"""Writing so that a crash, of the process or of the machine, leaves either the old state or the new one."""

import os
import uuid
from pathlib import Path

PART_PREFIX = "."  # names of files that are not complete


def part_of(path: Path) -> Path:
    """A fresh name beside `path` for what is going to replace it."""
    return path.with_name(f"{PART_PREFIX}{path.name}.{uuid.uuid4().hex}")


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace a file. Raises: OSError."""
    part = part_of(path)
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names that were created, renamed or removed in it durable. Raises: OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
