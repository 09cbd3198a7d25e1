"""Gated pooling as the formula: a softmax over the slots of a block, per channel. Source: spec 4.4."""

import torch


def pool_entries(kv: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, overlap: bool) -> torch.Tensor:
    if not overlap:
        return _pool(kv[rows.clamp(min=0)], gate[rows.clamp(min=0)], rows)
    ratio, dim = rows.shape[1] // 2, kv.shape[1] // 2
    previous, own = rows[:, :ratio].clamp(min=0), rows[:, ratio:].clamp(min=0)
    # A token gives its first half to the next block and its second half to its own.
    values = torch.cat((kv[:, :dim][previous], kv[:, dim:][own]), dim=1)  # [E, 2 * ratio, dim]
    gates = torch.cat((gate[:, :dim][previous], gate[:, dim:][own]), dim=1)
    return _pool(values, gates, rows)


def _pool(values: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    gates = gates.masked_fill((rows < 0).unsqueeze(-1), float("-inf"))
    return (gates.softmax(dim=1) * values).sum(dim=1)
