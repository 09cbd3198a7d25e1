"""Peers: kernels of other libraries for the same case, timed beside ours on machines that have the library.

A peer gets the input sets of the case and brings them into its library's layout, outside of what is timed. What it
computes is compared with our result before it is timed: an adapter that computes something else is a failure, not a
time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("flash_mla", "deep_gemm", "marlin")
_MARLIN = "vllm", "_moe_C_stable_libtorch*.so", "_moe_C"  # package, file, namespace of its operators


class PeerError(RuntimeError):
    """A peer computes something else than our op; the message has the difference and its limit."""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """One input set in a library's layout."""

    run: Callable[[], Any]  # graph-capturable
    difference: Callable[[Any, Any], float]  # of our result and of what `run` returned


@dataclass(frozen=True, slots=True)
class Peer:
    """How a case runs with a library."""

    library: str  # one of LIBRARIES
    prepare: Callable[[Any, Sequence[Any]], list[PeerCall]]  # the library and the input sets of the case
    limit: float  # of the difference
    lacks: str = ""  # what our op does and this does not
    is_part: bool = False  # a piece of what our op does: timed, and not compared


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a library is not there."""

    is_installed: bool
    reason: str


def find_module(name: str) -> Any | Absence:
    """Import a module that may be missing or built for another machine."""
    if find_spec(name) is None:
        return Absence(False, "not installed")
    return _guarded(lambda: import_module(name))


def find_operators(package: str, pattern: str, namespace: str) -> Any | Absence:
    """Operators of a package's shared library; the package itself, with all that it needs, is not imported."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for place in places for file in Path(place).glob(pattern))
    if not files:
        return Absence(False, "not installed")

    def load() -> Any:
        torch.ops.load_library(str(files[0]))
        return getattr(torch.ops, namespace)

    return _guarded(load)


def _guarded(load: Callable[[], Any]) -> Any | Absence:
    try:
        return load()
    except Exception as error:  # a library built for another PyTorch fails in ways of its own
        return Absence(True, f"does not import: {type(error).__name__}: {error}")


def find_libraries() -> dict[str, Any | Absence]:
    """Every library that a peer may ask for: a module, or a namespace of operators."""
    found = {name: find_module(name) for name in LIBRARIES if name != "marlin"}
    return found | {"marlin": find_operators(*_MARLIN)}


def describe(found: dict[str, Any | Absence]) -> str:
    """One line for the head of a report."""
    words = [f"{name} {one.reason if isinstance(one, Absence) else 'found'}" for name, one in found.items()]
    return f"other libraries: {', '.join(words)}"


def one_by_one(prepare_one: Callable[[Any, Any], PeerCall]) -> Callable[[Any, Sequence[Any]], list[PeerCall]]:
    """Prepares every input set by itself."""
    return lambda library, inputs: [prepare_one(library, one) for one in inputs]


def prepare(peer: Peer, library: Any, inputs: Sequence[Any], ours: Any) -> list[PeerCall]:
    """Bring all input sets into the peer's layout and compare the first one's result with ours.

    Raises: PeerError when they differ by more than the peer's limit, or by NaN.
    """
    calls = peer.prepare(library, inputs)
    difference = calls[0].difference(ours, calls[0].run())
    if not difference <= peer.limit:
        raise PeerError(f"differs from our result by {difference:.3g}, limit {peer.limit:.3g}")
    return calls
