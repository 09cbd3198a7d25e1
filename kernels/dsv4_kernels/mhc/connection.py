"""What one hyper-connection computes with: the arguments that all implementations of its ops share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Connection:
    """Parameters of the collapse of S streams of D channels, and of how its output mixes back."""

    fn: torch.Tensor  # [(2 + S) * S, S * D] fp32; of the head [S, S * D]
    scale: torch.Tensor  # [3] fp32; of the head [1]
    base: torch.Tensor  # [(2 + S) * S] fp32; of the head [S]
    norm_weight: torch.Tensor | None  # [D] fp32 of the RMS norm that follows, None = no norm
    eps: float
    norm_eps: float
    num_iters: int | None = None  # of Sinkhorn; None = the head, which mixes nothing back
    quantise: bool = False  # the collapsed streams in E4M3 as well
