"""Serving cluster for the DeepSeek V4 models on Ray.

`LLM` and `SamplingParams` are imported on first use, so that a router process never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_cluster.offline import LLM, CompletionOutput, RequestOutput, SamplingParams
    from dsv4_cluster.protocol.request import StructuredSpec

_HOMES = {
    "LLM": "dsv4_cluster.offline",
    "CompletionOutput": "dsv4_cluster.offline",
    "RequestOutput": "dsv4_cluster.offline",
    "SamplingParams": "dsv4_cluster.offline",
    "StructuredSpec": "dsv4_cluster.protocol.request",
}
__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredSpec", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
