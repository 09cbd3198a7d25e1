"""torch's large CPU blocks in one range of memory, so that what a step takes is the same in every run: arena.cpp.

torch has one CPU allocator per process. The arena takes its place for the process's lifetime; tensors made before it
keep their memory. Any processor will do, a C++ compiler is needed.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from dsv4_kernels.native.build import ARENA, NativeBuildError, build

logger = logging.getLogger(__name__)

SMALLEST_BLOCK = 64 << 10  # bytes; smaller blocks stay in the C library's heap
_opening = Lock()


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """Bytes."""

    in_use: int  # blocks of tensors
    peak_in_use: int  # since it was asked last
    extent: int  # what ever held a block, holes included: no more can be resident


class Arena:
    """The process's arena; see `open_arena`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def use(self) -> ArenaUse:
        """What it holds and held."""
        values = (ctypes.c_int64 * 3)()
        self._library.dsv4_arena_measure(values)
        return ArenaUse(*values)

    def give_back(self) -> None:
        """Return free pages to the system; the next block there starts with zeroed ones, which takes time."""
        self._library.dsv4_arena_give_back()


def open_arena() -> Arena | None:
    """Let torch's blocks of SMALLEST_BLOCK bytes and more come from the arena from now on.

    Returns: the process's one arena; None, and the reason is logged once, where it cannot be had.
    """
    with _opening:
        return _open()


@cache
def _open() -> Arena | None:
    try:
        library = ctypes.CDLL(str(build(ARENA, Path.home() / ".cache" / "dsv4-kernels")))
    except (NativeBuildError, OSError) as err:
        logger.warning("no arena for large CPU blocks; they stay in the C library's heap, which takes more: %s", err)
        return None
    library.dsv4_arena_open.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # addresses; pages come when written to
    if library.dsv4_arena_open(num_bytes, SMALLEST_BLOCK):
        logger.warning("no arena for large CPU blocks: %d bytes of address space are not to be had", num_bytes)
        return None
    return Arena(library)
