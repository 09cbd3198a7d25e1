"""Rotary embedding as the formula: pair (2i, 2i+1) as a complex number, times exp(j position f_i). Source: spec 3.3."""

import math

import torch

from dsv4_kernels.norm.reference import rms_norm


def plain_frequencies(rope_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def yarn_frequencies(
    rope_dim: int, theta: float, factor: float, original_positions: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    def correction(num_rotations: float) -> float:
        """Pair index that turns `num_rotations` times within the original context."""
        return rope_dim * math.log(original_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    pair = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)  # 1e-3 keeps a step when both ends coincide
    frequencies = plain_frequencies(rope_dim, theta)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angle = positions.float().unsqueeze(-1) * frequencies  # fp32 position x fp32 frequency, as the reference forms it
    return torch.complex(angle.cos(), angle.sin())


def apply_rope_(x: torch.Tensor, cis: torch.Tensor, inverse: bool) -> torch.Tensor:
    tail = x[..., x.shape[-1] - 2 * cis.shape[-1] :]
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))  # [..., rope_dim / 2]
    turned = pairs * (cis.conj() if inverse else cis)
    tail.copy_(torch.view_as_real(turned).flatten(-2))
    return x


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor) -> torch.Tensor:
    table = cis.view(cis.shape[0], *([1] * (x.dim() - 2)), cis.shape[1])
    return apply_rope_(rms_norm(x, weight, eps), table, inverse=False)


norm_rope_ = norm_rope
