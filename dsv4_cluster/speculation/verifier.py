"""Which drafts stand: those that the main model samples itself.

Noise is a pure function of (seed, position), so the token that plain decoding would draw at a position is known as soon
as its logits are. A draft is accepted exactly when it is that token; the first other token replaces its draft and ends
the step. Answers therefore equal plain decoding token for token, for any proposer and any number of drafts.
"""

from collections.abc import Sequence


def verified_tokens(drafts: Sequence[int], sampled: Sequence[int], is_finite: Sequence[bool]) -> list[int]:
    """The tokens that a step adds to a sequence.

    drafts: k token ids. sampled: k + 1 token ids; entry j was sampled after the first j drafts. is_finite: of the same
    rows, False = the row's logits held NaN or inf.
    Returns: the accepted drafts and the token sampled after them. A row that is not finite ends the list before its
    token, so that the failure shows at its own position in a later step; the list is empty when it is the first row.
    """
    assert len(sampled) == len(is_finite) == len(drafts) + 1, (len(drafts), len(sampled), len(is_finite))
    tokens: list[int] = []
    for j, (token_id, finite) in enumerate(zip(sampled, is_finite, strict=True)):
        if not finite:
            break
        tokens.append(token_id)
        if j < len(drafts) and token_id != drafts[j]:
            break
    return tokens


def num_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of `tokens`, a beginning of `verified_tokens`, are accepted drafts."""
    pairs = zip(drafts, tokens, strict=False)
    return next((j for j, (draft, token_id) in enumerate(pairs) if draft != token_id), min(len(drafts), len(tokens)))
