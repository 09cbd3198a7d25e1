"""The fingerprint follows everything that may change an answer."""

import pytest

from dsv4_cluster.config.system_fingerprint import system_fingerprint
from dsv4_cluster.errors import CheckpointError


def test_it_is_stable_and_changes_with_weights_config_and_settings(tmp_path):
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(range(256)) * 400)
    config.write_text("{}")
    found = [system_fingerprint(tmp_path, "bf16")]

    assert system_fingerprint(str(tmp_path), "bf16") == found[0]
    assert found[0].startswith("fp_") and len(found[0]) == 19
    found.append(system_fingerprint(tmp_path, "fp8"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    found.append(system_fingerprint(tmp_path, "bf16"))
    config.write_text("[]")
    found.append(system_fingerprint(tmp_path, "bf16"))
    assert len(set(found)) == 4


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        system_fingerprint(tmp_path / "nowhere", "bf16")
