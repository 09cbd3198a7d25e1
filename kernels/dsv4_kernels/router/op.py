"""Public router op. Source: spec 4.7."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    input_ids: torch.Tensor,
    *,
    vocab_size: int,
    topk: int,
    renormalise: bool,
    scaling: float,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in fp32, then the best `topk` experts by score plus bias, or those that a table fixes for the token.

    x: [T, D]. weight: [E, D] of x's dtype. input_ids: [T] int64; a row whose id is not in 0 .. vocab_size - 1 is
    padding and routes nowhere. bias: [E] fp32, for selection only. table: [vocab_size, topk] int32 or int64; an entry
    that is no expert routes nowhere. Exactly one of bias and table is given.
    Returns: ids [T, topk] int32, -1 = nowhere, ties to the lower expert; weights [T, topk] fp32, 0 where nowhere.
    Batch-invariant: a row's bits do not depend on the rows beside it, nor on their number.
    Raises: ValueError when shapes do not fit or both, or neither, of bias and table are given.
    """
    num_experts, dim = weight.shape
    if (bias is None) == (table is None):
        raise ValueError("give either a bias (routing by score) or a table (routing by token id)")
    if x.shape[1] != dim or input_ids.shape != x.shape[:1] or not 0 < topk <= num_experts:
        raise ValueError(
            f"x {tuple(x.shape)}, ids {tuple(input_ids.shape)}, top {topk} do not fit {tuple(weight.shape)}"
        )
    if table is not None and tuple(table.shape) != (vocab_size, topk):
        raise ValueError(f"table has shape {tuple(table.shape)}, expected {(vocab_size, topk)}")
    module = implementation("router", x.device, x.dtype, impl)
    return module.route(x, weight, input_ids, bias, table, vocab_size, topk, renormalise, scaling)  # type: ignore[no-any-return]
