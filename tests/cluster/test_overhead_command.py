"""`dsv4 bench overhead` on a small scale."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize("route", [[], ["--through-proxy"]], ids=["router", "proxy"])
def test_every_spoken_word_arrives_and_only_json_is_printed(route):
    command = [str(Path(sys.executable).parent / "dsv4"), "bench", "overhead", "--json"]
    options = ["--streams", "4", "--steps-per-s", "20", "--duration", "4", *route]

    printed = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=True).stdout

    result = json.loads(printed)
    assert result["offered_rate"] == 80
    assert 0.8 * 4 * 80 < result["num_tokens"] <= 4 * 80
    assert 0 < result["latency_p50_ms"] <= result["latency_p99_ms"] <= result["latency_max_ms"]
