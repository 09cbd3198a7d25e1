"""What decoding has to read at least, and how fast this device reads: the roof that decode speed is compared with."""

import time

import torch

from dsv4_cluster.config.model_config import ModelConfig
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


def decode_weight_bytes(config: ModelConfig, dtype: torch.dtype, batch_size: int) -> float:
    """Weight bytes that one decode step of `batch_size` sequences reads: dense weights once, experts as chosen.

    Of E experts, a batch of b tokens with k choices each touches E (1 - (1 - k/E)^b) on average if choices are
    uniform. The embedding table is not read as a whole and cache rows are not counted, so the result is a lower bound.
    """
    share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch_size
    num_elements = sum(
        spec.num_parameters * (share if ".experts." in spec.name else 1.0)
        for spec in inventory(config, include_mtp=False).values()
        if not spec.name.startswith("embed.")
    )
    return num_elements * dtype.itemsize
