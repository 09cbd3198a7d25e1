"""Native sources are compiled once, also by processes that start at the same time; needs compilers for C and C++."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dsv4_kernels.native.build import ARENA, KERNELS, NativeBuildError, build


@pytest.mark.parametrize(("recipe", "function"), [(KERNELS, "dsv4_gemm"), (ARENA, "dsv4_arena_open")])
def test_two_builds_at_the_same_time_end_with_one_whole_library(recipe, function, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, [recipe] * 2, [tmp_path] * 2)

    assert first == second
    assert list(tmp_path.iterdir()) == [first]
    assert getattr(ctypes.CDLL(str(first)), function)
    written_ns = first.stat().st_mtime_ns
    assert build(recipe, tmp_path).stat().st_mtime_ns == written_ns  # found, not compiled again


def test_a_library_for_another_release_of_torch_is_another_file(tmp_path):
    assert build(replace(ARENA, depends_on="2.0.0"), tmp_path) != build(ARENA, tmp_path)


def test_what_is_missing_or_fails_is_an_error_with_the_compilers_words(tmp_path):
    with pytest.raises(NativeBuildError, match="no compiler found, looked for no-such-compiler"):
        build(replace(ARENA, compilers=("no-such-compiler",)), tmp_path)
    with pytest.raises(NativeBuildError, match=r"c\+\+ failed:\n.*Allocator\.h"):
        build(replace(ARENA, flags=("-fPIC", "-shared")), tmp_path)
