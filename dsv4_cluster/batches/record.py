"""The state of a batch: what its file on disk holds."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from dsv4_cluster.errors import Dsv4Error

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OVER: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """Why a batch could not run; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUsage:
    """Tokens of all answers together. Cached ones are part of the input, reasoning ones of the output."""

    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    def __add__(self, other: "BatchUsage") -> "BatchUsage":
        return BatchUsage(
            num_input_tokens=self.num_input_tokens + other.num_input_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_output_tokens=self.num_output_tokens + other.num_output_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens + other.num_reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch. Times are Unix times in seconds."""

    batch_id: str
    tenant: str
    key_name: str  # of the API key that asked, whose limits and priority its lines have
    endpoint: str
    input_file_id: str
    output_file_id: str  # set from the start; shown once there is something in it
    error_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_s: int
    expires_s: int
    status: BatchStatus = "validating"
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    reached_s: dict[str, int] = field(default_factory=dict)  # status -> when it was reached
    faults: tuple[BatchFault, ...] = ()
    model: str | None = None  # that all answers name, once the batch is over
    usage: BatchUsage | None = None  # once the batch is over

    @property
    def is_over(self) -> bool:
        """True when nothing will change any more."""
        return self.status in OVER

    def to_json(self) -> bytes:
        """What the file holds."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The inverse; None without the file. Raises: Dsv4Error that names a damaged file, OSError."""
        try:
            fields = json.loads(path.read_bytes())
            faults = tuple(BatchFault(**fault) for fault in fields["faults"])
            usage = None if fields.get("usage") is None else BatchUsage(**fields["usage"])
            return cls(**{**fields, "faults": faults, "usage": usage})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as err:
            raise Dsv4Error(f"{path} is damaged: {err!r:.200}") from err
