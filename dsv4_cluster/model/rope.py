"""Which rotary frequencies a layer uses. Source: spec 3.3."""

import torch

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_kernels.rope import plain_frequencies, yarn_frequencies


def rope_frequencies(config: ModelConfig, ratio: int, device: torch.device) -> torch.Tensor:
    """Frequencies of a layer: plain for window-only layers, compress_rope_theta with YaRN for CSA and HCA.

    ratio: 0, 4 or 128. Returns: [qk_rope_head_dim / 2] fp32. All rotations of a layer use the same ones.
    """
    dim = config.qk_rope_head_dim
    if ratio == 0:
        return plain_frequencies(dim, config.rope_theta).to(device)
    scaling = config.rope_scaling
    if scaling is None:
        return plain_frequencies(dim, config.compress_rope_theta).to(device)
    return yarn_frequencies(
        dim,
        config.compress_rope_theta,
        factor=scaling.factor,
        original_positions=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
    ).to(device)
