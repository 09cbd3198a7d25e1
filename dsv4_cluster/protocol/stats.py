"""Counters of one engine, cheap to take at any time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; all counts are of now except the `total_` ones."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_held: int  # prefilled, waiting for export
    free_pages: int  # that no sequence owns; the prefix cache gives up its own when they are needed
    num_pages: int
    num_preemptions: int
    total_prompt_tokens: int
    total_generated_tokens: int
    num_steps: int
    last_step_ms: float
    num_cached_pages: int = 0  # that only the prefix cache owns
    num_snapshots: int = 0  # resumable boundaries
    num_evictions: int = 0  # boundaries given up for room
    total_hit_tokens: int = 0  # prompt tokens that were resumed instead of computed
    total_drafted_tokens: int = 0
    total_accepted_tokens: int = 0  # drafts that became part of an answer

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts per draft, None before the first one."""
        return self.total_accepted_tokens / self.total_drafted_tokens if self.total_drafted_tokens else None
