"""When a sequence ends, decided on token ids. Stop strings are matched above the engine, on text.

min_tokens wins over EOS and stop ids (they are not sampled before), max_tokens over everything. EOS inside thoughts is
a stop token like anywhere else, except where the caller limited the thoughts or constrained the answer: see
sampling_state.py.
"""

from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.protocol.request import GenerationRequest


def stop_token_ids(request: GenerationRequest, eos_token_id: int) -> tuple[int, ...]:
    """The ids that end this request: the caller's, and the model's EOS unless ignore_eos."""
    own = request.stop.token_ids
    return own if request.stop.ignore_eos or eos_token_id in own else (*own, eos_token_id)


def banned_token_ids(sequence: Sequence, eos_token_id: int, *, num_drafts: int = 0) -> tuple[int, ...]:
    """Ids that may not be sampled after `num_drafts` more tokens, because min_tokens is not reached."""
    if sequence.num_generated_tokens + num_drafts >= sequence.request.stop.min_tokens:
        return ()
    return stop_token_ids(sequence.request, eos_token_id)


def finish_reason(sequence: Sequence, eos_token_id: int) -> tuple[FinishReason | None, int | None]:
    """(reason, stop token id) after the sequence's last token was appended; (None, None) while it goes on."""
    last = sequence.token_ids[-1]
    if last in stop_token_ids(sequence.request, eos_token_id):
        return FinishReason.STOP, last
    if sequence.num_generated_tokens >= sequence.request.sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None, None
