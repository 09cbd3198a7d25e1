"""What decoding has to read at least, and how fast this device reads: the roof that decode speed is compared with."""

import time

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.weights.inventory import inventory

_READ_BYTES = 256 << 20  # far larger than any last-level cache share of a thread


def read_bandwidth(device: str = "cpu", *, num_repeats: int = 5) -> float:
    """Fastest of a few sums over a buffer larger than the caches, with torch's threads. Returns: bytes per second."""
    buffer = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(num_repeats + 1):  # the first one also warms up
        started = time.perf_counter()
        buffer.sum().item()  # waits for a device
        best_s = min(best_s, time.perf_counter() - started)
    return _READ_BYTES / best_s


def decode_weight_bytes(
    config: ModelConfig, dtype: torch.dtype, batch_size: int, *, bytes_per_expert_weight: float | None = None
) -> float:
    """Weight bytes that one decode step of `batch_size` sequences reads: dense weights once, experts as chosen.

    Of E experts, a batch of b tokens with k choices each touches E (1 - (1 - k/E)^b) on average if choices are
    uniform. The embedding table is not read as a whole and cache rows are not counted, so the result is a lower bound.
    bytes_per_expert_weight: of routed experts as they lie in memory; None = they have `dtype`.
    """
    share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch_size
    expert_bytes = share * (dtype.itemsize if bytes_per_expert_weight is None else bytes_per_expert_weight)
    return sum(
        spec.num_parameters * (expert_bytes if ".experts." in spec.name else dtype.itemsize)
        for spec in inventory(config, include_mtp=False).values()
        if not spec.name.startswith("embed.")
    )


def bytes_per_expert_weight(model: nn.Module, config: ModelConfig) -> float:
    """Of the routed experts of a loaded model that holds all of them; less than the dtype's size when they are FP4."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    num_bytes = sum(p.numel() * p.element_size() for module in experts for p in module.parameters())
    per_layer = 3 * config.n_routed_experts * config.hidden_size * config.moe_intermediate_size
    return num_bytes / (len(experts) * per_layer)
