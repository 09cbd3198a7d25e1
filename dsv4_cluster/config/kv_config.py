"""Settings of the KV cache."""

from typing import Literal

from pydantic import Field

from dsv4_cluster.config.base import Settings

PAGE_TOKENS = 256  # original tokens per page, all layer kinds: 64 CSA entries, 2 HCA entries. Source: spec 6.1


class KVConfig(Settings):
    """Precision and size of the pools."""

    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="auto = compute dtype (exact); fp8 = the production row of 448 FP8 + 64 BF16 + 7 scales"
    )
    indexer_dtype: Literal["auto", "fp8", "fp4"] = Field("auto", description="indexer keys, auto = compute dtype")
    num_pages: int = Field(64, ge=1, description=f"pages of {PAGE_TOKENS} tokens shared by all sequences")
    speculation_headroom: int = Field(
        8, ge=0, le=64, description="extra ring rows so that rejected drafts never overwrite a live row"
    )
