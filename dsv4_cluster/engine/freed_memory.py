"""Memory that steps on a CPU have freed: where it stays until it is used again.

With the arena of dsv4_kernels it stays there, and a process holds what its largest step took. Without one it goes to
the C library's heap: small blocks between the large ones leave holes, so that equal prompts take different amounts.
"""

import ctypes

from dsv4_kernels.native.arena import open_arena

MAX_HEAP_BLOCK = 32 << 20  # bytes; larger blocks are mapped one by one (DEFAULT_MMAP_THRESHOLD_MAX of glibc)
_MIN_TOKENS = 1024  # smaller steps free little; a larger one takes 100 ms and more, and giving back about 2 ms
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def prepare_memory() -> bool:
    """Call before loading. Returns: whether this process has an arena.

    Without one, the thresholds of the heap are fixed at the values that glibc would raise them to by and by: where a
    block lies then depends less on everything that came before.
    """
    if open_arena() is not None:
        return True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK)
    return False


def give_back_freed_memory() -> None:
    """Return free pages to the system."""
    arena = open_arena()
    if arena is not None:
        arena.give_back()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def give_back_after_step(num_tokens: int) -> None:
    """Without an arena, return what a large step has freed: the holes of many such steps would add up."""
    if num_tokens >= _MIN_TOKENS and open_arena() is None:
        give_back_freed_memory()
