"""Memory that was freed and that the C library still holds: how much, and until when.

Only glibc has these calls; elsewhere nothing happens.
"""

import ctypes

# Steps of fewer tokens free little; a larger one takes 100 ms and more on a CPU, and giving back about 2 ms.
MIN_TOKENS = 1024

MAX_HEAP_BLOCK = 32 << 20  # bytes; larger blocks are mapped one by one (DEFAULT_MMAP_THRESHOLD_MAX)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def settle_heap() -> None:
    """Fix the thresholds of this process's heap at the values that glibc would raise them to by and by.

    It raises them as blocks are freed. Where a block lies then depends on everything that came before, and equal
    prompts take different amounts of memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK)


def give_back_freed_memory() -> None:
    """Return free pages of the heap to the system.

    Blocks of several sizes that come and go leave holes in the heap; over the chunks of a long prompt they add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
