"""Every implementation that this machine can run is tested; what needs a GPU carries the marker `gpu`.

The C kernels need AVX-512 BF16 and a C compiler, the arena a C++ compiler. Without them there is nothing of theirs to
collect, and `test_dispatch.py` checks that the references run instead. Triton kernels run in the interpreter (fixture
`triton_device`, which has a second form on the GPU) and are compiled for sm_90a; see docs/kernels.md.
"""

from collections.abc import Iterator

import pytest
import torch
import triton

from dsv4_kernels.native.build import ARENA, KERNELS, find_compiler
from dsv4_kernels.native.library import is_available
from tests.kit.triton_interpreter import interpreted

collect_ignore = [] if is_available(torch.device("cpu"), torch.float32) else ["test_native.py"]
collect_ignore += [] if find_compiler(ARENA) else ["test_arena.py"]
collect_ignore += [] if find_compiler(ARENA) and find_compiler(KERNELS) else ["test_native_build.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def _triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels compiled by this session, shared by its tests, gone afterwards."""
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
    yield
    triton.knobs.cache.dir = before


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Device of the inputs of a Triton op: CPU, where kernels are interpreted, or the GPU."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with interpreted():
        yield torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    """For tests with the marker `gpu`."""
    return torch.device("cuda")


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Seeded from the test's name, on CPU; move what it draws to the device."""
    return torch.Generator().manual_seed(sum(map(ord, request.node.name)))
