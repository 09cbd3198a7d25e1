"""Compile native sources once per machine into the user's cache directory.

The C kernels need no header of torch or Python, so they survive upgrades of both; the arena is written against torch's
allocator and is compiled for its release. The result is named after a hash of sources, flags, compiler and processor: a
stale one is never loaded.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

_TIMEOUT_S = 300
_TORCH = Path(torch.__file__).parent


class NativeBuildError(RuntimeError):
    """There is no compiler, or it failed; the message holds its output."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One shared library."""

    name: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    depends_on: str = ""  # what else makes a library stale


_SHARED = ("-fPIC", "-fvisibility=hidden", "-shared")
KERNELS = Recipe(
    name="native",
    sources=("gemm.c", "streams.c", "attention.c", "experts.c", "select.c"),
    headers=("common.h", "fp4.h", "gemm.h"),
    compilers=("cc", "gcc", "clang"),
    # No contraction: a product and a sum are fused where the source says so, on every compiler.
    flags=("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", *_SHARED),
    # torch is loaded first and brings libgomp.so.1 along; the library then finds that copy: one thread pool for both.
    libraries=("-lm",),
)
ARENA = Recipe(
    name="arena",
    sources=("arena.cpp",),
    headers=(),
    compilers=("c++", "g++", "clang++"),
    flags=("-std=c++20", "-O2", f"-I{_TORCH / 'include'}", *_SHARED),
    libraries=(f"-L{_TORCH / 'lib'}", "-lc10"),
    depends_on=torch.__version__,
)


def find_compiler(recipe: Recipe) -> str | None:
    """Path of the first of its compilers that is installed."""
    return next(filter(None, map(shutil.which, recipe.compilers)), None)


def build(recipe: Recipe, cache_dir: Path) -> Path:
    """Path of the shared library, compiled if it is not in `cache_dir` yet. Raises: NativeBuildError."""
    compiler = find_compiler(recipe)
    if compiler is None:
        raise NativeBuildError(f"no compiler found, looked for {', '.join(recipe.compilers)}")
    library = cache_dir / f"dsv4-{recipe.name}-{_build_id(recipe, compiler)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as work:
            made = Path(work) / "library.so"
            _compile(recipe, compiler, made)
            os.replace(made, library)  # atomic: processes that build at the same time end with one whole file
    except OSError as err:
        raise NativeBuildError(f"cannot write the compiled library to {cache_dir}: {err}") from err
    return library


def _compile(recipe: Recipe, compiler: str, out: Path) -> None:
    sources = (str(Path(__file__).parent / name) for name in recipe.sources)
    command = [compiler, *recipe.flags, "-o", str(out), *sources, *recipe.libraries]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise NativeBuildError(f"{compiler} failed:\n{result.stderr[-2000:]}")


def _build_id(recipe: Recipe, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256(version)
    digest.update(" ".join((*recipe.flags, *recipe.libraries, recipe.depends_on)).encode())
    digest.update(_processor())
    for name in (*recipe.sources, *recipe.headers):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"".join(next((line for line in lines if line.startswith(key)), b"") for key in (b"model name", b"flags"))
