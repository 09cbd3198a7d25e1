"""A router process with the scripted service, whose size and CPU time can be read.

`python -m tests.kit.scripted_router DIR` prints its URL and serves until its input ends. Every answer is one word. Its
stores are small, so that what it may keep is full soon.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.responses_config import ResponsesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

STOP_TIMEOUT_S = 20.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running one."""

    url: str
    pid: int

    def resident_bytes(self) -> int:
        """Memory that is in use at the moment."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def cpu_s(self) -> float:
        """CPU time since it was started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def router_process(directory: Path) -> Iterator[RouterProcess]:
    """Run one for the length of the block. directory: for files and batches."""
    command = [sys.executable, "-m", "tests.kit.scripted_router", str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "kernels")))}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, "the router did not start"
        yield RouterProcess(url, process.pid)
        assert process.poll() is None, f"the router ended with {process.returncode}"
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def main(directory: str) -> None:
    codec, service = load_codec(), ScriptedService()
    answer = chunks_of(tokens_of("Hello"))

    def script(_):
        service.requests.clear()  # nobody looks at them, and they would be what grows
        return answer

    service.script = script
    config = RouterConfig(
        max_body_bytes=256 << 10,
        batches=BatchesConfig(dir=directory, max_files_per_tenant=8),
        responses=ResponsesConfig(max_entries=64, max_bytes=1 << 20),
    )
    with serving(create_app(service, codec, config, max_model_len=CONTEXT_LIMIT)) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
