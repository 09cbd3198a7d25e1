"""Settings of MTP speculation."""

from typing import Annotated, Literal

from pydantic import Field

from dsv4_cluster.config.base import Settings

MAX_DRAFT_TOKENS = 4


class SpeculationConfig(Settings):
    """Drafts per step. Whatever the number, answers are those of plain decoding."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | Literal["auto"] = Field(
        0,
        description="drafts per sequence and step from the MTP layer: 0 = plain decoding, 1 to 4, or auto = as many "
        "as measured acceptance and load make worthwhile",
    )

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of one sequence in one step; 0 = the MTP layer is not needed."""
        return MAX_DRAFT_TOKENS if self.num_draft_tokens == "auto" else self.num_draft_tokens
