"""Names of the metrics, each with what it counts. Prometheus conventions: base units, counters end in _total."""

PREFIX_CACHE = {
    # metric -> field of protocol.stats.PrefixCacheStats
    "dsv4_prefix_cache_pages": "num_cached_pages",
    "dsv4_prefix_cache_snapshots": "num_snapshots",
    "dsv4_prefix_cache_hits_total": "total_hits",
    "dsv4_prefix_cache_hit_tokens_total": "total_hit_tokens",
    "dsv4_prefix_cache_evictions_total": "total_evictions",
    "dsv4_host_tier_memory_bytes": "host_bytes",
    "dsv4_host_tier_disk_bytes": "disk_bytes",
    "dsv4_host_tier_stored_bytes_total": "total_bytes_stored",
    "dsv4_host_tier_restored_bytes_total": "total_bytes_restored",
    "dsv4_host_tier_memory_hits_total": "total_host_hits",
    "dsv4_host_tier_disk_hits_total": "total_disk_hits",
    "dsv4_host_tier_failures_total": "total_tier_failures",
}
