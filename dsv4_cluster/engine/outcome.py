"""What a step gave one sequence: its verified tokens, cut at the first that ends it."""

from dataclasses import dataclass

from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.engine.step import ScheduledChunk
from dsv4_cluster.engine.stop import finish_reason
from dsv4_cluster.protocol.output import FinishReason, TokenLogprobs
from dsv4_cluster.sampling.sampler import SampledTokens
from dsv4_cluster.speculation.verifier import num_accepted, verified_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The sequence has these tokens already; whoever reads this decides what becomes of it."""

    sequence: Sequence
    token_ids: tuple[int, ...]  # empty: the logits after its last token are not finite
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_drafted: int
    num_accepted: int


def take_tokens(
    chunk: ScheduledChunk, sequence: Sequence, sampled: SampledTokens, first_row: int, eos_token_id: int
) -> Outcome:
    """Append what the main model sampled, as far as the drafts before it are right. Mutates `sequence`.

    sampled: of the step; the sequence's rows begin at `first_row`, one for its last token and one per draft.
    """
    rows = slice(first_row, first_row + 1 + chunk.num_drafts)
    tokens = verified_tokens(chunk.draft_token_ids, sampled.token_ids[rows], sampled.is_finite[rows])
    reason, stop_token_id, taken = None, None, 0
    for token_id in tokens:
        sequence.token_ids.append(token_id)
        taken += 1
        reason, stop_token_id = finish_reason(sequence, eos_token_id)
        if reason is not None:
            break
    sequence.num_computed_tokens = chunk.end + max(0, taken - 1)  # the last token has no cache row yet
    logprobs = tuple(entry for entry in sampled.logprobs[first_row : first_row + taken] if entry is not None)
    return Outcome(
        sequence,
        tuple(tokens[:taken]),
        logprobs or None,
        reason,
        stop_token_id,
        chunk.num_drafts,
        num_accepted(chunk.draft_token_ids, tokens[:taken]),
    )
