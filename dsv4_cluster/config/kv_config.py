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
    prefix_cache: bool = Field(True, description="resume prompts from what earlier requests computed; exact")
    num_snapshots: int | None = Field(
        None, ge=0, description="resumable boundaries kept; default: two per sequence and one per 8 pages"
    )
    snapshot_prompt_end: bool = Field(True, description="keep the last boundary of every prompt")
    snapshot_answer_end: bool = Field(True, description="keep the last boundary of every answer, for the next turn")
    snapshot_branches: bool = Field(True, description="keep boundaries where prompts were seen to part")
    snapshot_every_pages: int = Field(16, ge=0, description="keep a boundary every so many pages; 0 = do not")
    cache_thinking: bool = Field(
        True, description="keep answers that began with thoughts; of no use where the next turn drops the thoughts"
    )
    host_memory_bytes: int = Field(0, ge=0, description="host memory for what falls out of the pools; 0 = none")
    host_disk_bytes: int = Field(0, ge=0, description="local disk for what falls out of host memory; 0 = none")
    host_disk_dir: str | None = Field(
        None, description="where the files go, in a directory of their own; default: the system's temporary files"
    )

    def snapshots_for(self, max_num_seqs: int) -> int:
        """Rows of the snapshot pool of an engine of `max_num_seqs` sequences."""
        if not self.prefix_cache:
            return 0
        return 2 * max_num_seqs + self.num_pages // 8 if self.num_snapshots is None else self.num_snapshots
