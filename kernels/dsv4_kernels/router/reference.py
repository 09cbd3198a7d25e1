"""Routing as the formula, from the product to the weights. Source: spec 4.7."""

import torch

from dsv4_kernels.moe.reference import route_by_hash, route_by_score


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    input_ids: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    vocab_size: int,
    topk: int,
    renormalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.float() @ weight.float().T  # [T, E]
    is_token = ((input_ids >= 0) & (input_ids < vocab_size)).unsqueeze(1)
    if table is None:
        assert bias is not None
        ids, weights = route_by_score(logits, bias, topk, renormalise, scaling)
        is_routed = is_token.expand_as(ids)
    else:
        named = table[torch.where(is_token.squeeze(1), input_ids, 0)].long()  # [T, topk]
        is_routed = is_token & (named >= 0) & (named < weight.shape[0])
        ids = torch.where(is_routed, named, 0)
        # An id that is none scores nothing: it takes no part in the normalisation either.
        padded = torch.cat((logits, logits.new_full((logits.shape[0], 1), float("-inf"))), dim=1)
        ids = torch.where(is_routed, ids, weight.shape[0])
        ids, weights = route_by_hash(padded, ids, renormalise, scaling)
    return torch.where(is_routed, ids, -1).int(), torch.where(is_routed, weights, 0.0)
