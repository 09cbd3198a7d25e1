"""Compile the C kernels once per machine into the user's cache directory.

The sources are plain C without headers of torch or Python, so a build takes a few seconds and survives upgrades of
both. The result is named after a hash of sources, flags, compiler and processor: a stale one is never loaded.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = ("gemm.c", "streams.c", "attention.c", "experts.c", "select.c")
_HEADERS = ("common.h", "fp4.h", "gemm.h")
# No contraction: a product and a sum are fused where the source says so, on every compiler.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-fvisibility=hidden")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 300


class NativeBuildError(RuntimeError):
    """There is no compiler, or it failed; the message holds its output."""


def build(cache_dir: Path) -> Path:
    """Path of the shared library, compiled if it is not in `cache_dir` yet. Raises: NativeBuildError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeBuildError(f"no C compiler found, looked for {', '.join(_COMPILERS)}")
    library = cache_dir / f"dsv4-native-{_build_id(compiler)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as work:
            made = Path(work) / "library.so"
            _compile(compiler, made)
            os.replace(made, library)  # atomic: processes that build at the same time end with one whole file
    except OSError as err:
        raise NativeBuildError(f"cannot write the compiled kernels to {cache_dir}: {err}") from err
    return library


def _compile(compiler: str, out: Path) -> None:
    here = Path(__file__).parent
    # torch is loaded first and brings libgomp.so.1 along; the library then finds that copy: one thread pool for both.
    command = [compiler, *_FLAGS, "-shared", "-o", str(out), *(str(here / name) for name in _SOURCES), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise NativeBuildError(f"{compiler} failed:\n{result.stderr[-2000:]}")


def _build_id(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256(version)
    digest.update(" ".join(_FLAGS).encode())
    digest.update(_processor())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"".join(next((line for line in lines if line.startswith(key)), b"") for key in (b"model name", b"flags"))
