"""`dsv4 serve` as a user starts and stops it."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.kit.clock import wait_until
from tests.kit.cluster import HOST, free_port, serve_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RAY_DIR = re.compile(r"/tmp/dsv4\.\w+")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_that_dsv4_serve_started(toy_dir, tmp_path, number):
    port = free_port()
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve_config(toy_dir, port)))
    command = [str(Path(sys.executable).parent / "dsv4"), "serve", str(path)]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("ready"))
        assert httpx.get(f"http://{HOST}:{port}/health", timeout=30).status_code == 200
        processes = descendants(process.pid)
        (ray_dir,) = {found for pid in processes for found in RAY_DIR.findall(command_line(pid))}
        process.send_signal(number)
        assert process.wait(60) == 0

    assert f"{HOST}:{port}" in ready
    assert len(processes) > 5  # Ray, Serve, replicas and workers
    wait_until(lambda: not any(is_running(pid) for pid in processes), limit_s=20)
    assert not Path(ray_dir).exists()


def command_line(pid: int) -> str:
    """The words of a running process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_requests_under_way_are_finished_and_new_ones_refused(toy_dir, tmp_path):
    port = free_port()
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve_config(toy_dir, port)))
    url = f"http://{HOST}:{port}/v1/completions"
    body = {"model": "toy", "prompt": "hi", "max_tokens": 1000, "ignore_eos": True}
    command = [str(Path(sys.executable).parent / "dsv4"), "serve", str(path)]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("ready"))
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.post(url, json={**body, "max_tokens": 1}, timeout=30).status_code == 503)
            rest = list(lines)
        assert process.wait(60) == 0

    assert rest[-2] == "data: [DONE]"


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return {*children, *(grandchild for child in children for grandchild in descendants(child))}


def is_running(pid: int) -> bool:
    """True for a process that is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
