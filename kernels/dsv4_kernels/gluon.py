"""The one door to Gluon, Triton's language with explicit layouts, and to its Hopper instructions.

Gluon is experimental in Triton 3.6: where its names move, this file follows. A `gluon_impl.py` is for compute
capability 9.0 alone, because `warpgroup_mma` is. It cannot run in the interpreter; its Triton sibling does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "mma_v2",
    "start_next",
    "tma",
    "wait_for_previous",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

jit = gluon.jit


@jit
def wait_for_previous():
    """As in `triton_pdl`: wait until the previous launch is complete and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def start_next():
    """As in `triton_pdl`: let the next launch start once every program of this one is here or has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
