"""torch's large CPU blocks lie in one range: whole, apart, given back when asked, and the same in every run.

A process has one arena for its lifetime, so what depends on its state runs in processes of their own.
"""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_kernels.native import arena as arena_module
from dsv4_kernels.native.arena import SMALLEST_BLOCK, open_arena
from dsv4_kernels.native.build import ARENA

PAGE = 4096


@pytest.fixture
def arena():
    """The process's arena, from which nothing is freed meanwhile but by the test."""
    gc.collect()
    gc.disable()
    arena = open_arena()
    assert arena is not None and open_arena() is arena
    yield arena
    gc.enable()


def in_a_process(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_large_blocks_are_in_it_and_small_ones_are_not(arena):
    before = arena.use().in_use

    small = torch.empty(SMALLEST_BLOCK - 1, dtype=torch.uint8)
    assert arena.use().in_use == before
    large = torch.empty(SMALLEST_BLOCK + 1, dtype=torch.uint8)
    assert arena.use().in_use == before + SMALLEST_BLOCK + PAGE
    assert large.data_ptr() % PAGE == 0
    del small, large
    assert arena.use().in_use == before
    assert arena.use().peak_in_use == before


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20_000)), max_size=60))
def test_no_block_touches_another_whatever_the_order_of_taking_and_freeing(arena, steps):
    before, held = arena.use().in_use, {}
    for number, (place, num_more) in enumerate(steps):
        held.pop(place, None)
        held[place] = (number, torch.full((SMALLEST_BLOCK // 8 + num_more,), number))

    assert all(bool((block == number).all()) for number, block in held.values())
    num_pages = sum(-(-block.nbytes // PAGE) for _, block in held.values())
    assert arena.use().in_use - before == num_pages * PAGE
    held.clear()
    assert arena.use().in_use == before


def test_threads_share_it(arena):
    def work(seed: int) -> bool:
        values = torch.arange(100_000) + seed
        for _ in range(50):
            values = values + 1
        return bool((values == torch.arange(100_000) + seed + 50).all())

    before = arena.use().in_use
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert arena.use().in_use == before


REPEATS = """
import torch
from dsv4_kernels.native.arena import open_arena
older = torch.arange(1 << 20)
arena = open_arena()
sizes = torch.randint(1 << 14, 1 << 20, (400,), generator=torch.Generator().manual_seed(0)).tolist()
held = []
for i, size in enumerate(sizes):
    held.append(torch.empty(size))
    if i % 3:
        held.pop(size % len(held))
held.clear()
assert torch.equal(older, torch.arange(1 << 20)), "a block from before lost its values"
assert arena.use().in_use == 0
print(arena.use().extent)
"""


def test_equal_runs_take_equal_memory_and_older_blocks_stay():
    first, second = in_a_process(REPEATS), in_a_process(REPEATS)

    assert first == second and int(first) > 0


GIVES_BACK = """
import torch
from dsv4_kernels.native.arena import open_arena

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

arena = open_arena()
kept = torch.ones(1 << 20)
freed = torch.ones(50 << 20)  # 200 MB
above = torch.ones(1 << 20)
del freed
before = resident()
arena.give_back()
print(before - resident(), float(kept.sum() + above.sum()), float(torch.empty(50 << 20).sum()))
"""


def test_free_pages_go_back_when_asked_and_blocks_in_use_stay():
    given_back, kept, fresh = in_a_process(GIVES_BACK).split()

    assert int(given_back) >= 190_000_000
    assert float(kept) == 2 << 20
    assert float(fresh) == 0


FORKS = """
import os, signal, threading, torch
from dsv4_kernels.native.arena import open_arena
torch.set_num_threads(1)
open_arena()
is_over = threading.Event()

def work():
    while not is_over.is_set():
        torch.empty(1 << 15).fill_(1)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for ever
        os._exit(int(torch.ones(1 << 15).sum() != 1 << 15))
    codes.append(os.waitpid(child, 0)[1])
    if codes[-1]:
        break
is_over.set()
for thread in threads:
    thread.join()
print(set(codes))
"""


def test_a_forked_child_can_use_it_whatever_other_threads_were_doing():
    assert in_a_process(FORKS) == "{0}"


FULL = """
import ctypes, torch
from pathlib import Path
from dsv4_kernels.native.build import ARENA, build
library = ctypes.CDLL(str(build(ARENA, Path.home() / ".cache" / "dsv4-kernels")))
library.dsv4_arena_open.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
assert library.dsv4_arena_open(1 << 20, 1 << 16) == 0
blocks = [torch.full((1 << 17,), i, dtype=torch.uint8) for i in range(20)]  # 8 fit
print(all(bool((block == i).all()) for i, block in enumerate(blocks)))
values = (ctypes.c_int64 * 3)()
library.dsv4_arena_measure(values)
print(values[0] == values[2] == 1 << 20)
"""


def test_blocks_beyond_its_end_come_from_the_c_library():
    assert in_a_process(FULL).split() == ["True", "True"]


PROFILED = """
import torch
from dsv4_kernels.native.arena import open_arena
open_arena()
with torch.profiler.profile(profile_memory=True) as profile:
    torch.empty(1 << 20)
print(max(event.cpu_memory_usage for event in profile.key_averages()))
"""


def test_torchs_profiler_sees_its_blocks():
    assert int(in_a_process(PROFILED)) == 4 << 20


def test_without_a_compiler_there_is_none_and_the_log_says_why(monkeypatch, caplog):
    monkeypatch.setattr(arena_module, "ARENA", replace(ARENA, compilers=("no-such-compiler",)))

    assert arena_module._open.__wrapped__() is None
    assert "no compiler found" in caplog.text
