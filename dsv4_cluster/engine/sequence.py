"""One request inside the engine: its tokens so far and how many of them are in the cache."""

from dataclasses import dataclass, field
from enum import StrEnum

from dsv4_cluster.engine.sampling_state import SamplingState
from dsv4_cluster.kv.prefix_index import PrefixEntry
from dsv4_cluster.protocol.output import TokenLogprobs
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.speculation.budget import Acceptance


class SequenceStatus(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"  # owns no pages
    RUNNING = "running"  # owns a slot and pages
    HELD = "held"  # prefilled and waiting for export; owns a slot and pages, is not scheduled


@dataclass(slots=True)
class PrefixChain:
    """What the prefix cache knows of a sequence; `engine/residency.py` alone reads and writes it."""

    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)  # one per complete block of 128 tokens hashed so far
    published: list[bytes] = field(default_factory=list)  # boundaries that this sequence added to the index
    rolling: PrefixEntry | None = None  # boundary that the next one of this answer replaces
    prefill_end: int = 0  # tokens known when the sequence was last admitted; later ones are decoded
    was_admitted: bool = False
    spilled_tokens: int = 0  # computed tokens whose live bytes the second tier keeps while the sequence waits


@dataclass(slots=True)
class Sequence:
    """Mutable and private to the engine. Invariant: num_computed_tokens < len(token_ids) while RUNNING."""

    request: GenerationRequest
    token_ids: list[int]  # prompt, then generated tokens
    hold_after_prefill: bool = False
    expires_at_s: float | None = None  # on the engine's clock
    status: SequenceStatus = SequenceStatus.WAITING
    admission_id: int = 0  # counts up as sequences first get pages: the smaller one is older
    num_computed_tokens: int = 0  # tokens whose cache rows are written
    num_cached_tokens: int = 0  # prompt tokens that came from a cache or a handoff instead of being computed
    chain: PrefixChain = field(default_factory=PrefixChain)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by prompt position
    sampling_state: SamplingState | None = None  # made when its first token is sampled, see sampling_rows.py
    acceptance: Acceptance = field(default_factory=Acceptance)  # of its drafts

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """It waits for nothing but its next token, and its first one is there."""
        return self.num_uncomputed_tokens == 1 and self.num_generated_tokens > 0

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens it may still generate."""
        return self.request.sampling.max_tokens - self.num_generated_tokens
