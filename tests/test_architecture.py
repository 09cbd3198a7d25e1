"""The house rules that a machine can check: layers, file size, no globals, no torch at the edge, types and lint."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "dsv4_cluster").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 400


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_imports_follow_the_layers():
    code = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c(['--no-cache']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_is_clean():
    run("ruff", "check", ".")


def test_ruff_format_is_clean():
    run("ruff", "format", "--check", ".")


def test_mypy_is_clean():
    run("mypy")


def test_every_file_is_at_most_400_lines():
    num_lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES + TESTS}
    assert not {path: n for path, n in num_lines.items() if n > MAX_LINES}


def test_no_global_statement():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not found


def test_no_environment_reads_in_the_package():
    found = [str(p.relative_to(ROOT)) for p in SOURCES if "os.environ" in p.read_text() or "getenv" in p.read_text()]
    allowed = {"dsv4_cluster/serve/environment.py"}  # checks that Ray's own RAY_SERVE_* settings are there
    assert set(found) <= allowed


@pytest.mark.parametrize(
    "module",
    [
        "dsv4_cluster",
        "dsv4_cluster.protocol.services",
        "dsv4_cluster.config.load",
        "dsv4_cluster.router.orchestrator",
        "dsv4_cluster.frontend.app",
        "dsv4_cluster.tokenizer.encoding",
    ],
)
def test_module_loads_without_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{module} imported torch\n{result.stderr}"
