"""Settings of MTP speculation."""

from pydantic import Field

from dsv4_cluster.config.base import Settings


class SpeculationConfig(Settings):
    """Drafts per step. 0 = plain decoding."""

    num_draft_tokens: int = Field(0, ge=0, le=4, description="drafts per step from the MTP layer")
