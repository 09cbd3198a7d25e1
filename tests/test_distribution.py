"""How processes share the suite: files stay whole, one process has the Ray cluster, a seed gives one order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.distribution import unit_of

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = (
    *("-p", "xdist", "-p", "random_order.plugin", "--random-order", "--random-order-seed=7"),
    *("-v", "-n", "2", "--dist=loadgroup", "--no-loadscope-reorder"),
)
HOOKS = "from tests.kit.distribution import pytest_collection_modifyitems, pytest_xdist_make_scheduler"
NUM_FILES, NUM_TESTS = 4, 5
RAY_MARK = "pytest.mark." + "ray"  # in two parts, so that this file does not seem to carry it


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A small project with our scheduler, two rooms and a few files in each."""
    project = tmp_path_factory.mktemp("project")
    (project / "conftest.py").write_text(HOOKS)
    for room in ("cluster", "engine"):
        (project / "tests" / room).mkdir(parents=True)
        for file in range(NUM_FILES):
            tests = "".join(f"def test_{room}_{file}_{number}(): pass\n" for number in range(NUM_TESTS))
            (project / "tests" / room / f"test_{room}_{file}.py").write_text(tests)
    return project


@pytest.fixture(scope="module")
def passed(project) -> list[tuple[str, str]]:
    """(worker, test) in the order in which the tests ended."""
    return _run(project)


def _run(project: Path) -> list[tuple[str, str]]:
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *OPTIONS]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "--random-order-seed=7" in result.stdout
    return re.findall(r"\[(gw\d)\].* PASSED (\S+)", result.stdout)


def test_every_file_is_run_whole_by_one_process(passed):
    assert len(passed) == 2 * NUM_FILES * NUM_TESTS
    workers = {}
    for worker, test in passed:
        workers.setdefault(test.partition("::")[0], set()).add(worker)
    assert all(len(found) == 1 for found in workers.values())


def test_one_process_runs_all_of_the_cluster_and_starts_with_it(passed):
    (worker,) = {worker for worker, test in passed if test.startswith("tests/cluster/")}
    rooms = [test.split("/")[1] for by, test in passed if by == worker]

    assert rooms[: NUM_FILES * NUM_TESTS] == ["cluster"] * NUM_FILES * NUM_TESTS


def test_the_seed_that_is_printed_gives_the_same_shuffled_order_again(project, passed):
    def by_file(tests: list[str]) -> dict[str, list[str]]:
        return {file: [test for test in tests if test.startswith(file)] for file in {t.split("::")[0] for t in tests}}

    once = by_file([test for _, test in passed])
    again = by_file([test for _, test in _run(project)])

    assert once == again
    assert any(tests != sorted(tests) for tests in once.values())


def test_whatever_uses_the_ray_cluster_lies_in_its_room():
    marked = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/test_*.py") if RAY_MARK in p.read_text()]

    assert {unit_of(path) for path in marked} == {"tests/cluster/"}
