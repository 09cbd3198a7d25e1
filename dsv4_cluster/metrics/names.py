"""Names of the metrics of a replica, each with its field and what it counts.

Prometheus conventions: base units, counters end in _total. The router's own are in router_metrics.py.
"""

# metric -> (field of protocol.stats.EngineStats, documentation)
ENGINE = {
    "dsv4_engine_running_sequences": ("num_running", "Sequences that are computed"),
    "dsv4_engine_waiting_sequences": ("num_waiting", "Sequences that wait for a place"),
    "dsv4_engine_waiting_tokens": ("num_waiting_tokens", "Prompt tokens that wait to be computed"),
    "dsv4_engine_held_sequences": ("num_held", "Prefilled sequences that wait for their handoff"),
    "dsv4_kv_free_pages": ("free_pages", "Cache pages that no sequence owns"),
    "dsv4_kv_pages": ("num_pages", "Cache pages"),
    "dsv4_engine_preemptions_total": ("num_preemptions", "Sequences put back into the queue"),
    "dsv4_engine_prompt_tokens_total": ("total_prompt_tokens", "Prompt tokens computed"),
    "dsv4_engine_generated_tokens_total": ("total_generated_tokens", "Tokens generated"),
    "dsv4_engine_steps_total": ("num_steps", "Engine steps"),
    "dsv4_engine_last_step_milliseconds": ("last_step_ms", "Duration of the last step"),
    "dsv4_engine_drafted_tokens_total": ("total_drafted_tokens", "Tokens drafted by speculation"),
    "dsv4_engine_accepted_tokens_total": ("total_accepted_tokens", "Drafted tokens that stood"),
}

# metric -> (field of protocol.stats.PrefixCacheStats, documentation)
PREFIX_CACHE = {
    "dsv4_prefix_cache_pages": ("num_cached_pages", "Cached pages that no sequence owns"),
    "dsv4_prefix_cache_snapshots": ("num_snapshots", "Resumable boundaries"),
    "dsv4_prefix_cache_hits_total": ("total_hits", "Requests that resumed somewhere"),
    "dsv4_prefix_cache_hit_tokens_total": ("total_hit_tokens", "Prompt tokens resumed instead of computed"),
    "dsv4_host_tier_memory_bytes": ("host_bytes", "Second tier, in host memory now"),
    "dsv4_host_tier_disk_bytes": ("disk_bytes", "Second tier, in files now"),
    "dsv4_host_tier_stored_bytes_total": ("total_bytes_stored", "Bytes that went into the second tier"),
    "dsv4_host_tier_restored_bytes_total": ("total_bytes_restored", "Bytes that came back from it"),
    "dsv4_host_tier_memory_hits_total": ("total_host_hits", "Restored from host memory"),
    "dsv4_host_tier_disk_hits_total": ("total_disk_hits", "Restored with at least one file"),
    "dsv4_host_tier_failures_total": ("total_tier_failures", "Blobs that were damaged, short or unreadable"),
}

# metric -> (label, {its value: field of protocol.stats.PrefixCacheStats}, documentation)
PREFIX_CACHE_PARTS = {
    "dsv4_prefix_cache_bytes": (
        "kind",
        {"pages": "page_bytes", "windows": "window_bytes", "states": "state_bytes"},
        "Held for resumable boundaries, without the pages of sequences",
    ),
    "dsv4_prefix_cache_evicted_bytes_total": (
        "kind",
        {
            "pages": "total_evicted_page_bytes",
            "windows": "total_evicted_window_bytes",
            "states": "total_evicted_state_bytes",
        },
        "Given up with evicted boundaries",
    ),
    "dsv4_prefix_cache_evictions_total": (
        "reason",
        {"pages": "total_page_evictions", "snapshots": "total_snapshot_evictions"},
        "Boundaries that gave way, by what was short",
    ),
}
