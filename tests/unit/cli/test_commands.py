"""The commands as a user runs them: real processes, exit codes, one clear line on stderr for an expected failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def dsv4(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "from dsv4_cluster.cli.main import app; app()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_help_lists_the_commands_and_loads_no_heavy_package():
    code = (
        "import sys\nfrom dsv4_cluster.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    for command in ("generate", "make-checkpoint", "inspect", "check", "serve"):
        assert command in result.stdout


def test_make_checkpoint_writes_once_and_inspect_reads_it(tmp_path):
    out = tmp_path / "toy"

    first = dsv4("make-checkpoint", "--preset", "toy", "--out", out)
    second = dsv4("make-checkpoint", "--preset", "toy", "--out", out)
    report = dsv4("inspect", out)

    assert first.returncode == second.returncode == report.returncode == 0, first.stderr + report.stderr
    assert "made" in first.stdout and "already" in second.stdout
    assert "F8_E4M3" in report.stdout and "I8" in report.stdout


def test_inspect_shows_the_split_asked_for():
    result = dsv4("inspect", "--shape", "flash", "--tp", "8", "--ep", "8")

    assert result.returncode == 0, result.stderr
    assert "69,187 tensors, 159,609,485,896 bytes" in result.stdout
    assert "22,112,090,056" in result.stdout


def test_generate_prints_json_with_token_ids(toy_dir):
    result = dsv4("generate", toy_dir, "--prompt", "Hello", "--max-tokens", "4", "--temperature", "0", "--json")

    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert 1 <= len(answer["token_ids"]) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make-checkpoint", "--preset", "huge", "--out", "x"], "huge"),
        (["inspect", "no-such-directory"], "config.json"),
        (["inspect"], "either"),
        (["generate", "no-such-directory", "--prompt", "a"], "config.json"),
        (["check", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_an_expected_failure_is_one_line_and_a_non_zero_exit(arguments, message):
    result = dsv4(*arguments)

    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_check_accepts_the_shipped_config_and_names_a_misspelt_key(tmp_path):
    shipped = ROOT / "configs" / "dsv4.yaml"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(shipped.read_text().replace("max_num_seqs", "max_nums_seq", 1))

    assert dsv4("check", shipped).returncode == 0
    result = dsv4("check", wrong)

    assert result.returncode != 0
    assert "max_nums_seq" in result.stderr
