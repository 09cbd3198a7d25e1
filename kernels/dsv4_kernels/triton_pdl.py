"""Programmatic dependent launch for the Triton kernels: a kernel starts while the one before it finishes.

A kernel launched with `launch_pdl=True` calls `wait_for_previous` before it reads what earlier launches wrote and
before it writes anything: memory that an earlier launch still reads may have been given to this one. `start_next` comes
after that wait, where a program has only its results left to write. Any earlier, and the next kernel's programs crowd
onto the multiprocessors that happen to be free: experts at one token took 55 us instead of 45 when it came first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl


def uses_ptx(x: torch.Tensor) -> bool:
    """Inline PTX where the compiler emits it; the interpreter and other GPUs take the arithmetic branches."""
    return x.device.type != "cpu" and torch.version.hip is None


@triton.jit
def wait_for_previous(use_ptx: tl.constexpr):
    """Wait until the previous launch is complete and its writes are visible."""
    if use_ptx:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(use_ptx: tl.constexpr):
    """Let the next launch start once every program of this one is here or has ended."""
    if use_ptx:
        tl.extra.cuda.gdc_launch_dependents()
