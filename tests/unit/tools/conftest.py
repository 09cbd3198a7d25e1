"""A toy and a tiny checkpoint, made once per session."""

from pathlib import Path

import pytest

from dsv4_cluster.tools.make_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory) -> Path:
    return make_checkpoint("toy", tmp_path_factory.mktemp("checkpoints") / "toy").path
