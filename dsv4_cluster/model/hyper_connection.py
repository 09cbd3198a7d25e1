"""Hyper-connection parameters of a module and the mixing they describe. Source: spec 4.2."""

from collections.abc import Callable

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.norm import RMSNorm
from dsv4_kernels.mhc import hc_head, hc_post_, hc_pre


def add_hyper_connection(
    module: nn.Module, name: str, config: ModelConfig, device: torch.device, *, is_head: bool = False
) -> None:
    """Register `{name}_fn`, `{name}_base` and `{name}_scale` on `module`, fp32, under the checkpoint's flat names."""
    streams = config.hc_mult
    num_mixes = streams if is_head else (2 + streams) * streams
    shapes = {"fn": (num_mixes, streams * config.hidden_size), "base": (num_mixes,), "scale": (1 if is_head else 3,)}
    for suffix, shape in shapes.items():
        values = torch.empty(shape, dtype=torch.float32, device=device)
        module.register_parameter(f"{name}_{suffix}", nn.Parameter(values, requires_grad=False))


def around(
    module: nn.Module,
    name: str,
    config: ModelConfig,
    norm: RMSNorm,
    x: torch.Tensor,
    sub_layer: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run a sub-layer on the normed mix-in of the streams and mix it out.

    x: [T, S, D], its memory may hold the result. Returns: [T, S, D].
    """
    y, post, comb = _pre(module, name, config, norm, x)
    return hc_post_(sub_layer(y), x, post, comb)


def mix_in(module: nn.Module, name: str, config: ModelConfig, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """The normed input of a sub-layer. x: [T, S, D]. Returns: [T, D]."""
    return _pre(module, name, config, norm, x)[0]


def collapse(module: nn.Module, config: ModelConfig, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Streams to one normed vector with the `hc_head_*` parameters. x: [T, S, D]. Returns: [T, D]."""
    return hc_head(
        x,
        *_parameters(module, "hc_head"),
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        norm_weight=norm.weight,
    )


def _pre(
    module: nn.Module, name: str, config: ModelConfig, norm: RMSNorm, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return hc_pre(
        x,
        *_parameters(module, name),
        num_iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        norm_weight=norm.weight,
    )


def _parameters(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn, scale, base = (getattr(module, f"{name}_{suffix}") for suffix in ("fn", "scale", "base"))
    return fn, scale, base
