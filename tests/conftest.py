"""Checkpoints that many tests share, made once per session, and machines without the C kernels."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsv4_cluster.tools.make_checkpoint import make_checkpoint
from dsv4_kernels import dispatch
from tests.kit.distribution import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401, hooks

torch.set_num_threads(1)  # toy matrices are too small for more, and the suite shares its cores with what it starts
MakeCheckpoint = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory) -> MakeCheckpoint:
    """checkpoint_dir(preset, format) -> directory; equal seeds, so official and bf16 hold equal values."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(preset: str, fmt: str = "official") -> Path:
        out = root / f"{preset}-{fmt}"
        if not out.exists():
            make_checkpoint(preset, out, seed=0, fmt=fmt)
        return out

    return get


@pytest.fixture(scope="session")
def toy_dir(checkpoint_dir) -> Path:
    """The toy preset in the official format."""
    return checkpoint_dir("toy", "official")


@pytest.fixture
def without_native(monkeypatch) -> Iterator[None]:
    """As on a machine where the C kernels do not run; what was chosen there is forgotten before and after."""
    monkeypatch.setattr(dispatch, "is_available", lambda device, dtype: False)
    _forget_choices()
    yield
    _forget_choices()


def _forget_choices() -> None:
    for chosen in (dispatch.choose, dispatch.implementation, dispatch.why_not):
        chosen.cache_clear()
