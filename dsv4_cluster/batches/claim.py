"""A batch that this process alone may run. Every call blocks; all of them come from one thread.

An answer counts once its line is in the output or the error file and fsync has returned. A line that a crash cut off
is removed by whoever takes the batch next, and its request is answered again.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_cluster.batches.durable import sync_directory, write_durably
from dsv4_cluster.batches.file_store import FileStore
from dsv4_cluster.batches.paced import paced
from dsv4_cluster.batches.record import BatchFault, BatchRecord, BatchStatus, BatchUsage
from dsv4_cluster.batches.results import read_results

RECORD_FILE, INPUT_FILE, CANCEL_FILE = "batch.json", "input.jsonl", "cancel"


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """One line of a result file, with its line end."""

    text: bytes
    is_error: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """What the result files hold."""

    custom_ids: frozenset[str]
    num_completed: int
    num_failed: int
    models: frozenset[str]  # names that answers carry
    usage: BatchUsage


class BatchClaim:
    """Holds the lock until `release`."""

    def __init__(self, record: BatchRecord, directory: Path, marker: Path, lock: int, files: FileStore) -> None:
        self.record = record
        self._directory = directory
        self._marker = marker
        self._lock = lock
        self._files = files
        self._output = files.contents(record.tenant, record.output_file_id)
        self._errors = files.contents(record.tenant, record.error_file_id)

    def save(self, **changes: Any) -> None:
        """Change fields of the record, durably. Raises: OSError."""
        self.record = dataclasses.replace(self.record, **changes)
        write_durably(self._directory / RECORD_FILE, self.record.to_json())

    def enter(self, status: BatchStatus, **changes: Any) -> None:
        """Reach a status. Raises: OSError."""
        self.save(status=status, reached_s={**self.record.reached_s, status: int(time.time())}, **changes)

    @property
    def cancel_asked_s(self) -> int | None:
        """When somebody asked for the end of the batch, in Unix time. Raises: OSError."""
        return time_in(self._directory / CANCEL_FILE)

    def input_lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, text) of every line that is not blank. Raises: OSError."""
        with (self._directory / INPUT_FILE).open("rb") as file:
            for number, line in enumerate(paced(file), start=1):
                if line.strip():
                    yield number, line

    def answered(self) -> Answered:
        """Read what has been answered; removes the line that a crash cut off. Raises: OSError."""
        output, errors = (read_results(path) for path in (self._output, self._errors))
        return Answered(
            custom_ids=frozenset(output.custom_ids | errors.custom_ids),
            num_completed=len(output.custom_ids),
            num_failed=len(errors.custom_ids),
            models=frozenset(output.models),
            usage=output.usage,
        )

    def append(self, lines: Sequence[AnswerLine]) -> None:
        """Write answers; they are durable afterwards. Raises: OSError, after which only `release` may be called."""
        for path, is_error in ((self._output, False), (self._errors, True)):
            data = b"".join(line.text for line in lines if line.is_error is is_error)
            if data:
                is_fresh = not path.exists()
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fdatasync(file.fileno())
                if is_fresh:
                    sync_directory(path.parent)

    def finish(self, status: BatchStatus, faults: Sequence[BatchFault] = ()) -> None:
        """Publish the result files and close the batch; again after a crash is harmless. Raises: OSError."""
        answered = self.answered()
        record = self.record
        for file_id, num_lines, kind in (
            (record.output_file_id, answered.num_completed, "output"),
            (record.error_file_id, answered.num_failed, "error"),
        ):
            if num_lines:
                name = f"{record.batch_id}_{kind}.jsonl"
                self._files.describe(record.tenant, file_id, filename=name, purpose="batch_output")
        asked_s = self.cancel_asked_s
        if asked_s is not None:
            self.record.reached_s["cancelling"] = asked_s
        self.enter(
            status,
            num_completed=answered.num_completed,
            num_failed=answered.num_failed,
            has_output=answered.num_completed > 0,
            has_errors=answered.num_failed > 0,
            model=next(iter(answered.models)) if len(answered.models) == 1 else None,
            usage=answered.usage,
            faults=tuple(faults),
        )
        (self._directory / INPUT_FILE).unlink(missing_ok=True)
        self._marker.unlink()

    def release(self) -> None:
        """Let others take the batch, if it is not over."""
        os.close(self._lock)


def time_in(path: Path) -> int | None:
    """The Unix time that a file holds, None without the file. Raises: OSError."""
    try:
        return int(path.read_bytes())
    except FileNotFoundError:
        return None
