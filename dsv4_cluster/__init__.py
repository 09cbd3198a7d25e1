"""Serving cluster for the DeepSeek V4 models on Ray.

`LLM` and `SamplingParams` are imported on first use, so that a router process never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_cluster.offline import LLM, CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "CompletionOutput", "RequestOutput", "SamplingParams"):
        return getattr(importlib.import_module("dsv4_cluster.offline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
