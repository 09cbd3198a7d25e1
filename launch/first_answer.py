"""Wait until a served config answers, then stream one chat answer to the terminal. Standard library and PyYAML only.

Usage: first_answer.py CONFIG LOG PID, where PID is the process that serves CONFIG and writes LOG.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

READY_LIMIT_S = 180.0
POLL_PERIOD_S = 0.25
FAILURE_PERIOD_S = 5.0
QUESTION = "Say hello to the cluster."
MAX_TOKENS = 48


def main() -> int:
    """Returns: the exit code, 0 = an answer came."""
    config_path, log, pid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = yaml.safe_load(config_path.read_text())
    http = config["http_options"]
    base_url = f"http://{http['host']}:{http['port']}"
    model = config["applications"][0]["args"]["model"]["served_names"][0]

    started = time.monotonic()
    problem = _wait_until_ready(base_url, log, pid)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"ready at {base_url} after {time.monotonic() - started:.0f} s")
    print(f"\n> {QUESTION}   (random weights: the answer is noise)\n")
    finish_reason = None
    for piece, reason in _stream_answer(base_url, model):
        print(piece, end="", flush=True)
        finish_reason = reason or finish_reason
    if finish_reason is None:
        print("\nerror: the answer broke off", file=sys.stderr)
        return 1
    print(f"\n\nfinished: {finish_reason}")
    return 0


def _wait_until_ready(base_url: str, log: Path, pid: int) -> str | None:
    """Returns: None when ready, else what is wrong."""
    deadline = time.monotonic() + READY_LIMIT_S
    next_question = time.monotonic() + FAILURE_PERIOD_S
    last = "no connection"
    while time.monotonic() < deadline:
        if not _is_running(pid):
            return "the serving process ended"
        if time.monotonic() > next_question:
            next_question = time.monotonic() + FAILURE_PERIOD_S
            failure = _deploy_failure(log)
            if failure:
                return failure
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=10) as answer:
                if answer.status == 200:
                    return None
        except urllib.error.HTTPError as err:
            last = f"HTTP {err.code}"
        except OSError as err:
            last = str(err)
        time.sleep(POLL_PERIOD_S)
    return f"{base_url}/ready was not ready within {READY_LIMIT_S:.0f} s ({last})"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _deploy_failure(log: Path) -> str | None:
    """What Serve says about applications that failed to start, asked at the dashboard that the log names."""
    dashboard = re.search(r"dashboard at .*?(http://[0-9.:]+|[0-9.]+:[0-9]+)", log.read_text(errors="replace"))
    if dashboard is None:
        return None
    url = dashboard[1] if dashboard[1].startswith("http") else f"http://{dashboard[1]}"
    try:
        with urllib.request.urlopen(f"{url}/api/serve/applications/", timeout=5) as answer:
            applications = json.load(answer)["applications"].values()
    except (OSError, ValueError, KeyError):
        return None  # not up yet; the next round asks again
    failed = [app["message"] for app in applications if "FAILED" in app["status"]]
    return "\n".join(_reason(message) for message in failed) or None


def _reason(message: str) -> str:
    """Our own error at the end of the traceback that Serve keeps, or all of it."""
    ours = [line for line in message.splitlines() if line.startswith("dsv4_cluster.errors.")]
    return ours[-1].partition(": ")[2] if ours else message


def _stream_answer(base_url: str, model: str) -> Iterator[tuple[str, str | None]]:
    """Yield (text, finish reason or None) of one chat answer. Thinking is off: random weights never close a thought."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "thinking": {"type": "disabled"},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"error: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or "", choice["finish_reason"]


if __name__ == "__main__":
    sys.exit(main())
