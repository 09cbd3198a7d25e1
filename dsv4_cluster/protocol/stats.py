"""Counters of one engine, cheap to take at any time."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """What the prefix cache holds and did, second tier included. A hit is a request that resumed somewhere."""

    num_cached_pages: int = 0  # that no sequence owns
    num_snapshots: int = 0  # resumable boundaries in the pools
    page_bytes: int = 0  # of the cached pages
    window_bytes: int = 0  # of the snapshots: window rows
    state_bytes: int = 0  # of the snapshots: compressor states and last hidden states
    total_hits: int = 0
    total_hit_tokens: int = 0  # prompt tokens that were resumed instead of computed
    total_page_evictions: int = 0  # boundaries that gave way because a sequence needed pages
    total_snapshot_evictions: int = 0  # boundaries that gave way because another one needed a snapshot
    total_evicted_page_bytes: int = 0  # pages that both kinds of evictions left without an owner
    total_evicted_window_bytes: int = 0
    total_evicted_state_bytes: int = 0
    host_bytes: int = 0  # in host memory now
    disk_bytes: int = 0  # in files now
    total_bytes_stored: int = 0  # into the second tier
    total_bytes_restored: int = 0  # out of it
    total_host_hits: int = 0  # restored from host memory
    total_disk_hits: int = 0  # restored with at least one file
    total_tier_failures: int = 0  # blobs that were damaged, short or unreadable


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
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    total_drafted_tokens: int = 0
    total_accepted_tokens: int = 0  # drafts that became part of an answer

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts per draft, None before the first one."""
        return self.total_accepted_tokens / self.total_drafted_tokens if self.total_drafted_tokens else None
