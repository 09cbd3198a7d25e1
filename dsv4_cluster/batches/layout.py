"""Where things lie in the directory of files and batches.

    files/t-TENANT/FILE_ID.jsonl    contents; also those of results that are still being written
    files/t-TENANT/FILE_ID.json     name, size and purpose: with it the file exists
    batches/t-TENANT/BATCH_ID/      batch.json, input.jsonl (a link to the contents), cancel (when it was asked for)
    active/BATCH_ID.t-TENANT        batches that are not over; the kernel's lock on it belongs to the router at work

Ids begin with the time of their creation, so names sort by age.
"""

import re
import time
import uuid
from pathlib import Path

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
OWNER_ONLY = 0o700  # prompts and answers lie there as text
_TIME_DIGITS = 12  # milliseconds in hexadecimal, good until the year 10889


def new_id(prefix: str) -> str:
    """The prefix and 32 hexadecimal digits: 12 of the time in ms, 20 random ones."""
    return f"{prefix}{time.time_ns() // 1_000_000:0{_TIME_DIGITS}x}{uuid.uuid4().hex[_TIME_DIGITS:]}"


def is_id(text: str, prefix: str) -> bool:
    """True for what `new_id` could have made; such a text is safe as a file name."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def tenant_name(tenant: str) -> str:
    """The tenant as a directory name. The prefix keeps `.`, `..` and the empty tenant harmless."""
    return f"t-{tenant}"


def make_directories(root: Path) -> tuple[Path, Path, Path]:
    """Create what is missing. Returns: the directories of files, batches and markers. Raises: OSError."""
    found = (root / "files", root / "batches", root / "active")
    for directory in found:
        directory.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
    return found


def page_of(ids: list[str], *, after: str | None, limit: int, is_ascending: bool) -> tuple[list[str], bool]:
    """The ids that follow `after` in the order of their age, at most `limit`. Returns: (page, whether there are more).

    `after` need not exist any more.
    """
    ordered = sorted(ids, reverse=not is_ascending)
    if after is not None:
        ordered = [one for one in ordered if (one > after if is_ascending else one < after)]
    return ordered[:limit], len(ordered) > limit
