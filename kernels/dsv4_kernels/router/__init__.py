"""Router: from a sub-layer's input to experts and their weights."""

from dsv4_kernels.router.op import route

__all__ = ["route"]
