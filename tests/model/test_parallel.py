"""Two ranks over gloo compute what one rank computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.parallel.collectives import all_gather, all_reduce
from dsv4_cluster.parallel.state import ParallelState

ROOT = Path(__file__).parents[2]
RANK_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.model.weight_map import load_weights
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.reader import Checkpoint
from tests.kit.model_harness import CPU, Harness

rank, rendezvous, checkpoint_dir, out = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
checkpoint = Checkpoint.open(checkpoint_dir)
results = {}
for axes in ("tp", "ep", "tp+ep"):
    tp, ep = (2, rank) if "tp" in axes else (1, 0), (2, rank) if "ep" in axes else (1, 0)
    parallel = ParallelState(tp_size=tp[0], tp_rank=tp[1], ep_size=ep[0], ep_rank=ep[1])
    model = Transformer(checkpoint.config, parallel, dtype=torch.float32, device=CPU,
                        kv_cache_dtype="auto", indexer_dtype="auto")
    load_weights(model, checkpoint, parallel)
    prompt = torch.load(f"{out}/prompt.pt").tolist()
    results[axes] = Harness(model, checkpoint.config).logprobs(prompt, [130, 7, 1])
torch.save(results, f"{out}/rank{rank}.pt")
dist.destroy_process_group()
"""


def test_two_ranks_equal_one(toy_dir, harness, tokens, tmp_path):
    prompt = tokens(140)
    torch.save(torch.tensor(prompt), tmp_path / "prompt.pt")
    arguments = [str(tmp_path / "rendezvous"), str(toy_dir), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}

    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK_PROGRAM, str(rank), *arguments], cwd=ROOT, env=environment)
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()

    assert codes == [0, 0]
    one = harness.logprobs(prompt)
    for rank in range(2):
        for axes, logprobs in torch.load(tmp_path / f"rank{rank}.pt").items():
            assert (logprobs - one).abs().max() <= 1e-4, (rank, axes)


def test_an_axis_without_a_matching_process_group_is_refused():
    with pytest.raises(ConfigError, match="tp_size is 2, but the process group has 1 ranks"):
        all_reduce(torch.zeros(1), ParallelState(tp_size=2), "tp")
    with pytest.raises(ConfigError, match="ep_size is 4"):
        all_gather(torch.zeros(1), ParallelState(ep_size=4), "ep", dim=0)


def test_collectives_of_one_rank_return_their_input():
    x = torch.zeros(3)

    assert all_reduce(x, ParallelState(), "tp") is x
    assert all_gather(x, ParallelState(), "ep", dim=0) is x
