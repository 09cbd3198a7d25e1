"""The C kernels are compiled once, also by processes that start at the same time; needs a C compiler."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

from dsv4_kernels.native.build import build


def test_two_builds_at_the_same_time_end_with_one_whole_library(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, [tmp_path, tmp_path])

    assert first == second
    assert list(tmp_path.iterdir()) == [first]
    assert ctypes.CDLL(str(first)).dsv4_gemm
    written_ns = first.stat().st_mtime_ns
    assert build(tmp_path).stat().st_mtime_ns == written_ns  # found, not compiled again
