"""Counters of one engine, cheap to take at any time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; all counts are of now except the `total_` ones."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_held: int  # prefilled, waiting for export
    free_pages: int
    num_pages: int
    num_preemptions: int
    total_prompt_tokens: int
    total_generated_tokens: int
    num_steps: int
    last_step_ms: float
