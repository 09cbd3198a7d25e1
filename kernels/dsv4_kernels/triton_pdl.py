"""Programmatic dependent launch for the Triton kernels: a kernel starts while the one before it still runs.

A kernel launched with `launch_pdl=True` may do what does not depend on earlier launches, such as asking for weights. It
calls `wait_for_previous` before it touches anything else, writes included: memory that an earlier launch still reads
may have been given to this one. As every kernel of a chain waits, and only then lets the next one start, what was
written two launches ago is complete from the first instruction on.
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
    """Wait until the previous launch is complete and visible, then let the next one start."""
    if use_ptx:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptrs, use_ptx: tl.constexpr):
    """Ask the L2 for the cache lines (128 bytes) of these addresses. ptrs: a block of pointers of any type."""
    if use_ptx:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
