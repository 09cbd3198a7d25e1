"""MemoryPlan: equal to what is allocated, bounded in the length of the prompt, and a refusal with the numbers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.loader import load_model
from dsv4_cluster.engine.step_peak import StepKernels, step_peak_bytes
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.tools.presets import preset_config

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_plan_equals_what_is_loaded_and_allocated(num_drafts, kv_cache_dtype, toy_dir):
    engine, kv = EngineConfig(max_num_seqs=3), KVConfig(num_pages=5, kv_cache_dtype=kv_cache_dtype)

    loaded = load_model(toy_dir, engine, kv, SpeculationConfig(num_draft_tokens=num_drafts), ParallelState())
    core = EngineCore(loaded, engine, kv, SpeculationConfig(num_draft_tokens=num_drafts))

    plan = loaded.plan
    modules = [loaded.model] if loaded.mtp is None else [loaded.model, loaded.mtp]
    assert plan.weights == sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    assert plan.pages + plan.sequences == loaded.pools.num_bytes
    snapshots = core._residency._snapshots
    assert plan.snapshot_windows == snapshots.windows.nbytes > 0
    assert plan.snapshot_states == snapshots.states.nbytes > 0
    assert (
        plan.device_total
        == plan.weights
        + loaded.pools.num_bytes
        + snapshots.windows.nbytes
        + snapshots.states.nbytes
        + plan.step_peak
        + plan.allocator
    )


def test_a_config_that_cannot_fit_is_refused_with_the_numbers(toy_dir):
    engine = EngineConfig(memory_limit_bytes=50_000_000)

    lines = "weights .* snapshot_windows .* snapshot_states .* step_peak .*num_pages"
    with pytest.raises(ConfigError, match=rf"needs [\d,.]+ MB, 50\.0 MB are there: {lines}"):
        load_model(toy_dir, engine, KVConfig(num_pages=400), SpeculationConfig(), ParallelState())


def test_host_memory_counts_on_a_cpu_and_is_refused_beyond_the_machine(toy_dir):
    plan = load_model(toy_dir, EngineConfig(), KVConfig(num_pages=1), SpeculationConfig(), ParallelState()).plan
    plan = replace(plan, host_tier=10**9)

    plan.check(device_bytes=plan.device_total, host_bytes=10**9, is_shared=False)
    with pytest.raises(ConfigError, match=r"host_tier 1,000\.0"):
        plan.check(device_bytes=plan.device_total, host_bytes=10**9, is_shared=True)
    with pytest.raises(ConfigError, match="host_memory_bytes is 1,000,000,000, the host has 7"):
        plan.check(device_bytes=plan.device_total, host_bytes=7, is_shared=False)


@pytest.mark.parametrize("preset", ["toy", "flash", "pro"])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_longer_prompt_adds_only_what_is_gathered_from_it_to_the_peak(preset, is_native):
    config, kernels = preset_config(preset), StepKernels(*[is_native] * 5)

    def peak(context: int) -> int:
        return step_peak_bytes(config, torch.bfloat16, kernels, num_tokens=2048, context=context)

    num_more = ((1 << 20) - (1 << 17)) // 4
    assert peak(1 << 20) - peak(1 << 17) <= num_more * config.index_head_dim * 6 + (1 << 26)


MEASURE = """
import json, sys, torch
from dsv4_cluster.engine import freed_memory
from dsv4_cluster.offline import LLM, SamplingParams

def memory():
    lines = [line.split() for line in open("/proc/self/status")]
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}

torch.set_num_threads(1)
num_tokens = int(sys.argv[2])
if "without_arena" in sys.argv:  # as on a machine without a C++ compiler
    freed_memory.open_arena = lambda: None
llm = LLM(sys.argv[1], num_pages=num_tokens // 256 + 1, max_num_seqs=1, dtype=sys.argv[3])
greedy = SamplingParams(max_tokens=1, temperature=0)
llm.generate(prompt_token_ids=list(range(16, 400)), sampling_params=greedy)  # loads code
freed_memory.give_back_freed_memory()
prompt = torch.randint(16, 500, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark starts again from here
before = memory()["VmRSS"]
output = llm.generate(prompt_token_ids=prompt, sampling_params=greedy)[0]
plan = llm.engine.memory_plan
print(json.dumps({
    "measured": memory()["VmHWM"] - before,
    "planned": plan.step_peak + plan.allocator,
    "num_generated": len(output.token_ids),
    "has_arena": freed_memory.open_arena() is not None,
}))
"""


LONG = pytest.param(131_072, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.fixture
def measure(toy_dir):
    """measure(num_tokens, dtype, *options) -> what a prompt of that length takes above the loaded engine.

    Resident memory in a process of its own. Rings, pages and snapshots are part of the loaded engine.
    """

    def run(num_tokens: int, dtype: str, *options: str) -> dict[str, int]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
        command = [sys.executable, "-c", MEASURE, str(toy_dir), str(num_tokens), dtype, *options]
        output = subprocess.run(
            command, env=environment | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, text=True
        ).stdout
        result: dict[str, int] = json.loads(output)
        assert result["num_generated"] == 1
        return result

    return run


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("num_tokens", [8192, LONG])
def test_a_prompt_runs_within_the_planned_memory_and_takes_nearly_all_of_it(num_tokens, dtype, measure):
    """Without a C++ compiler there is no arena, and the plan is a bound only."""
    result = measure(num_tokens, dtype)

    assert result["measured"] <= result["planned"], result
    assert result["planned"] <= 1.15 * result["measured"] or not result["has_arena"], result


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_prompt_runs_within_the_planned_memory_without_an_arena(dtype, measure):
    result = measure(3072, dtype, "without_arena")

    assert result["measured"] <= result["planned"], result
