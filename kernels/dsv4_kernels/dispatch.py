"""Which implementation of an op runs: a pure, cached choice from op, device and dtype.

The implementation name is an argument that comes from the configuration, never an environment variable.
"""

from functools import cache

import torch

from dsv4_kernels.native.library import is_available

AUTO = "auto"

# Ops and their implementations, the fastest first; "reference" runs anywhere.
# "native" are the C kernels: CPU, where they could be built.
_IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("native", "reference"),
    "compressor": ("native", "reference"),
    "gemm": ("native", "reference"),
    "indexer": ("native", "reference"),
    "mhc": ("native", "reference"),
    "moe": ("native", "reference"),
    "norm": ("native", "reference"),
    "quant": ("reference",),
    "rope": ("native", "reference"),
    "sampling": ("reference",),
}

# With fp32 activations the references run: somebody compares numbers, and torch's own products keep close selections of
# experts and entries where other fp32 programs put them (2,600 tokens of the tiny preset: 0 flips in 4 prompts, 2 in 4
# with the C kernels). The two ops named here have fp32 inputs in a bf16 model as well.
_NATIVE_IN_FP32 = frozenset({"compressor", "moe"})


class UnknownImplementationError(ValueError):
    """The op or the implementation asked for does not exist here; the message lists what does."""


@cache
def choose(op: str, device: torch.device, dtype: torch.dtype, impl: str = AUTO) -> str:
    """Name of the implementation to run.

    op: folder of the op below dsv4_kernels. device, dtype: of the op's main input.
    impl: "auto" for the best one, or a name to insist on.
    Raises: UnknownImplementationError (a ValueError) when the op or the implementation does not exist.
    """
    existing = _IMPLEMENTATIONS.get(op)
    if existing is None:
        raise UnknownImplementationError(f"unknown op {op!r}; there are {', '.join(sorted(_IMPLEMENTATIONS))}")
    if impl == AUTO:
        is_native = is_available(device, dtype) and (dtype != torch.float32 or op in _NATIVE_IN_FP32)
        return next(name for name in existing if name != "native" or is_native)
    if impl not in existing:
        raise UnknownImplementationError(f"op {op!r} has no implementation {impl!r}; there are {', '.join(existing)}")
    return impl
