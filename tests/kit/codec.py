"""The real V4 tokenizer and a cut-down one, loaded once per process; and token chunks for given texts."""

import functools
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.tools.tokenizer_files import REAL_VOCAB_SIZE, write_tokenizer

NAMES = ("deepseek-v4-flash", "an-alias")
CONTEXT_LIMIT = 4096


@functools.cache
def load_codec(vocab_size: int = REAL_VOCAB_SIZE) -> ModelCodec:
    """The codec of a checkpoint with this vocabulary size."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), vocab_size)
        return ModelCodec.from_checkpoint(directory, ServedModels.of(NAMES))


def tokens_of(text: str, codec: ModelCodec | None = None) -> list[int]:
    """Ids of a text, special tokens spelled in it included."""
    return (codec or load_codec()).chat.tokenizer.encode(text)


def chunks_of(
    token_ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    finish: FinishReason = FinishReason.STOP,
    stop_token_id: int | None = 1,
    with_logprobs: bool = False,
    num_cached_tokens: int = 0,
) -> list[TokenChunk]:
    """An engine's chunks for these ids: cut before the given indices; one token per chunk when no cut is given.

    The stop token is appended when finish is STOP and one is given.
    """
    ids = [*token_ids]
    if finish is FinishReason.STOP and stop_token_id is not None:
        ids.append(stop_token_id)
    bounds = sorted({0, len(ids), *(cuts or range(len(ids)))})
    chunks = []
    for start, end in pairwise(bounds):
        is_last = end == len(ids)
        chunks.append(
            TokenChunk(
                request_id="scripted",
                token_ids=tuple(ids[start:end]),
                logprobs=tuple(logprobs_of(i) for i in ids[start:end]) if with_logprobs else None,
                finish_reason=finish if is_last else None,
                stop_token_id=stop_token_id if is_last and finish is FinishReason.STOP else None,
                num_cached_tokens=num_cached_tokens,
            )
        )
    return chunks


def logprobs_of(token_id: int) -> dict[int, float]:
    """The chosen token and two alternatives, in no order; the first alternative is more probable than the choice."""
    return {token_id: -1.0, 3: -0.5, 8: -2.0}
