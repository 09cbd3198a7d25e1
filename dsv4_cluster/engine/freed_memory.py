"""Memory that was freed and that the C library still holds."""

import ctypes

# Steps of fewer tokens free little; a larger one takes 100 ms and more on a CPU, and giving back about 2 ms.
MIN_TOKENS = 1024


def give_back_freed_memory() -> None:
    """Return free pages of the heap to the system, where the C library can (glibc; elsewhere nothing happens).

    Blocks of several sizes that come and go leave holes in the heap; over the chunks of a long prompt they add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
