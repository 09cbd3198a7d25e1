"""Which boundaries of 128 tokens are kept, so that a later request can resume there.

| boundary                          | why                                                  | switch               |
|-----------------------------------|------------------------------------------------------|----------------------|
| the last one of the prompt        | the same prompt again                                | snapshot_prompt_end  |
| the last one of the answer so far | the next turn; it replaces the one before, unless    | snapshot_answer_end  |
|                                   | another request wants that one                       |                      |
| one every few pages               | prompts that are cut short, preempted sequences      | snapshot_every_pages |
| where prompts were seen to part   | beginnings that many share, such as a system message | snapshot_branches    |
"""

from collections.abc import Sequence as Seq

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.kv.prefix_index import BLOCK_TOKENS, SeenBlocks

_SEEN_BLOCKS_PER_PAGE = 8  # chains are remembered longer than their pages: a branch may show on the third visit


class Boundaries:
    """The policy of one engine, and its memory of earlier prompts."""

    def __init__(self, kv: KVConfig) -> None:
        self._config = kv
        self._seen = SeenBlocks(_SEEN_BLOCKS_PER_PAGE * kv.num_pages)

    def observe(self, keys: Seq[bytes]) -> None:
        """Note where a new chain parts from earlier ones."""
        self._seen.add(keys)

    def mark_branch(self, key: bytes) -> None:
        """Note that prompts part behind this block."""
        self._seen.mark(key)

    def is_kept(self, sequence: Sequence, boundary: int) -> bool:
        """True when a snapshot there is wanted whatever comes later."""
        config, chain = self._config, sequence.chain
        if boundary > sequence.num_prompt_tokens and not self.keeps_answer(sequence):
            return False
        ends = (sequence.num_prompt_tokens, chain.prefill_end)
        if config.snapshot_prompt_end and any(boundary == (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS for end in ends):
            return True
        if config.snapshot_every_pages and boundary % (config.snapshot_every_pages * PAGE_TOKENS) == 0:
            return True
        block = boundary // BLOCK_TOKENS - 1
        return config.snapshot_branches and block < len(chain.keys) and self._seen.is_branch(chain.keys[block])

    def keeps_answer(self, sequence: Sequence) -> bool:
        """True when generated tokens of the sequence may be indexed at all."""
        return self._config.snapshot_answer_end and (self._config.cache_thinking or not sequence.request.thinking)

    def first_kept(self, sequence: Sequence, end: int) -> int | None:
        """The first kept boundary after the computed tokens and before `end`."""
        first = (sequence.num_computed_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        return next((b for b in range(first, end, BLOCK_TOKENS) if self.is_kept(sequence, b)), None)


def resume_limit(sequence: Sequence) -> int:
    """Most tokens of a sequence that may come from a cache.

    Its last token is computed, because that gives the logits; and so is the one before the first prompt
    log-probability that is still missing.
    """
    limit = len(sequence.token_ids) - 1
    if sequence.request.sampling.prompt_logprobs is None:
        return limit
    missing = (p for p in range(1, sequence.num_prompt_tokens) if p not in sequence.prompt_logprobs)
    return min(limit, next(missing, limit + 1) - 1)
