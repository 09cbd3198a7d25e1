"""One timed case of an op: how to make its inputs, what to run, and what the chip could do at best.

Every op folder has a `bench.py` with `cases() -> list[KernelCase]`; `benchmark.py` finds and runs them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dsv4_kernels.peers import Peer

Roof = Literal["bandwidth", "fp8", "bf16", "microseconds"]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A case of `dsv4 bench kernels`.

    `make_inputs` returns several input sets that together exceed the L2 (60 MB), so that rotating through them measures
    device memory. `run` is captured in a CUDA graph: no host sync, no allocation that depends on data.
    """

    name: str  # "moe.fp4 decode"
    shape: str  # "32 tokens, 256 experts, 4096 x 2048, top 6"
    make_inputs: Callable[[torch.device, torch.Generator], list[Any]]
    run: Callable[[Any], Any]
    bytes_moved: float  # of one run: each input read once, each output written once
    flops: float  # of one run
    roof: Roof  # what binds, and what the two fractions refer to
    target_fraction: float  # of the roof; for "microseconds" the time that is good enough
    stretch_fraction: float  # of the roof; for "microseconds" the time to aim at
    # Other ways to run the case, timed beside `run`: candidates of tile sizes, other backends.
    variants: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    # Kernels of other libraries for the same inputs, by the name of their row.
    peers: Mapping[str, Peer] = field(default_factory=dict)
