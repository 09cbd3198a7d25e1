"""Batches outlive their router: real processes that are killed, and that share a directory."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.kit.clock import wait_until

MODEL = "deepseek-v4-flash"
TEXT = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path):
    """start() -> (process, client of it); all share this test's directory and end with the test."""
    with contextlib.ExitStack() as stack:

        def begin():
            command = [sys.executable, "-m", "tests.kit.batch_router", str(tmp_path / "batches"), str(tmp_path / "log")]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            url = process.stdout.readline().strip()
            assert url, "the router did not start"
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20)
            return process, stack.enter_context(client)

        yield begin


def submit(client, num_lines):
    requests = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": TEXT,
            "body": {"model": MODEL, "prompt": f"prompt {i}", "max_tokens": 8},
        }
        for i in range(num_lines)
    ]
    text = "\n".join(map(json.dumps, requests))
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h").id


def until_completed(client, batch_id):
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", limit_s=30)
    return client.batches.retrieve(batch_id)


def answers(client, batch):
    """[(custom id, text)] as they stand in the output."""
    lines = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in lines]


def expected(num_lines):
    return sorted((f"c{i}", f"prompt {i}") for i in range(num_lines))


def test_a_killed_router_goes_on_where_it_was_and_answers_nothing_twice(start, tmp_path):
    process, client = start()
    batch_id = submit(client, 80)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 5, limit_s=20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    contents = (tmp_path / "batches" / "files" / "t-").glob("*.jsonl")
    (unfinished,) = [path for path in contents if not path.with_suffix(".json").exists()]
    assert 5 <= unfinished.read_bytes().count(b"\n") < 80

    _, client = start()
    done = until_completed(client, batch_id)

    assert sorted(answers(client, done)) == expected(80)
    assert done.request_counts.to_dict() == {"total": 80, "completed": 80, "failed": 0}
    num_generated = len((tmp_path / "log").read_text().splitlines())
    assert num_generated <= 80 + 2  # again: at most the two that were under way


def test_two_routers_on_one_directory_run_a_batch_once_and_one_takes_over_from_the_other(start, tmp_path):
    (first, client), (second, other) = start(), start()
    batch_ids = [submit(client, 15), submit(other, 15)]

    for reader in (client, other):
        for batch_id in batch_ids:
            assert sorted(answers(reader, until_completed(reader, batch_id))) == expected(15)
    assert len((tmp_path / "log").read_text().splitlines()) == 30

    long = submit(client, 80)
    wait_until(lambda: other.batches.retrieve(long).request_counts.completed >= 3, limit_s=20)
    holder = _holder((first, second), tmp_path / "batches" / "active")
    holder.kill()
    survivor = other if holder is first else client

    assert sorted(answers(survivor, until_completed(survivor, long))) == expected(80)


def _holder(processes, active):
    """The process that has the lock of the only active batch, by the kernel's list."""
    inode = str(next(active.iterdir()).stat().st_ino)
    holders = {
        int(fields[4])
        for fields in map(str.split, Path("/proc/locks").read_text().splitlines())
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode
    }
    return next(process for process in processes if process.pid in holders)
