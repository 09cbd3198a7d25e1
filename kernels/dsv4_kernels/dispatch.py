"""Which implementation of an op runs: a pure, cached choice from op, device and dtype.

The implementation name is an argument that comes from the configuration, never an environment variable.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from dsv4_kernels.native.library import is_available

AUTO = "auto"

# Ops and their implementations, the fastest first; "reference" runs anywhere.
# "native" are the C kernels: CPU, where they could be built. "triton" and "tilelang" are for GPUs of the Hopper class;
# asked for by name they are handed out anywhere, because the tests interpret and compile them without a GPU. "gluon" is
# Triton's language with explicit layouts, for Hopper alone. "torch" is a library product of PyTorch's.
_IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("native", "reference"),
    "attention.decode": ("triton", "reference"),
    "attention.prefill": ("triton", "reference"),
    "compressor": ("triton", "native", "reference"),
    "gemm": ("native", "reference"),
    "gemm.fp8": ("triton", "torch", "reference"),
    "indexer": ("gluon", "triton", "native", "reference"),
    "kv": ("triton", "reference"),
    "mhc": ("triton", "native", "reference"),
    "moe": ("triton", "native", "reference"),
    "moe.fp4": ("triton", "reference"),
    "norm": ("triton", "native", "reference"),
    "quant": ("triton", "reference"),
    "rope": ("triton", "native", "reference"),
    "router": ("triton", "reference"),
    "sampling": ("triton", "reference"),
    "transfer": ("triton", "reference"),
}

# With fp32 activations the references run: somebody compares numbers, and torch's own products keep close selections of
# experts and entries where other fp32 programs put them (2,600 tokens of the tiny preset: 0 flips in 4 prompts, 2 in 4
# with the C kernels). The two ops named here have fp32 inputs in a bf16 model as well.
_NATIVE_IN_FP32 = frozenset({"compressor", "moe"})

_MODULES = {name: f"{name}_impl" for name in ("gluon", "triton", "tilelang", "torch")} | {
    name: name for name in ("native", "reference")
}
_MIN_CAPABILITY = (9, 0)  # FP8 tensor cores on 64-row operands; older GPUs run the references
_PACKAGES = {"gluon": "triton"}  # where the name of an implementation is not that of its package


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
        return next(name for name in existing if _is_best_here(name, op, device, dtype))
    if impl not in existing:
        raise UnknownImplementationError(f"op {op!r} has no implementation {impl!r}; there are {', '.join(existing)}")
    return impl


@cache
def implementation(op: str, device: torch.device, dtype: torch.dtype, impl: str = AUTO) -> ModuleType:
    """The chosen implementation's module, imported on first use: GPU compilers are optional packages.

    Arguments and errors as in `choose`; "a.b" is the folder a/b.
    """
    return import_module(f"dsv4_kernels.{op}.{_MODULES[choose(op, device, dtype, impl)]}")


def implementations() -> dict[str, tuple[str, ...]]:
    """Names of every op's implementations, the fastest first."""
    return dict(_IMPLEMENTATIONS)


@cache
def why_not(name: str, device: torch.device) -> str | None:
    """What is missing to run implementation `name` on `device`; None when it runs."""
    if name == "reference":
        return None
    if name == "native":
        return None if is_available(device, torch.bfloat16) else "needs an AVX-512 BF16 processor and a C compiler"
    package = _PACKAGES.get(name, name)
    if find_spec(package) is None:
        return f"package {package} is not installed"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "needs a GPU"
    capability = torch.cuda.get_device_capability(device)
    if name == "gluon":  # its wgmma instructions exist there and on no other generation
        return (
            None if capability == _MIN_CAPABILITY else f"needs compute capability {_MIN_CAPABILITY}, found {capability}"
        )
    return None if capability >= _MIN_CAPABILITY else f"needs compute capability {_MIN_CAPABILITY}, found {capability}"


def _is_best_here(name: str, op: str, device: torch.device, dtype: torch.dtype) -> bool:
    if name == "native":
        return is_available(device, dtype) and (dtype != torch.float32 or op in _NATIVE_IN_FP32)
    return why_not(name, device) is None
