"""Files that are not what their format promises: refused when opened, and never read as other weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_cluster.errors import CheckpointError
from dsv4_cluster.weights.reader import Checkpoint
from dsv4_cluster.weights.shards import INDEX_FILE

Header = dict[str, dict[str, object]]
LENGTH_BYTES = 8
NAME = "embed.weight"


def refuse(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return caught.value.message


def shard_of(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


@pytest.fixture
def edit_header(official_copy) -> Callable[[Callable[[Header], object]], Path]:
    """Rewrite the header of a copy's only shard; returns its directory."""

    def apply(change: Callable[[Header], object]) -> Path:
        path = shard_of(official_copy)
        raw = path.read_bytes()
        data_start = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
        header = json.loads(raw[LENGTH_BYTES:data_start])
        change(header)
        write_shard(path, json.dumps(header).encode(), raw[data_start:])
        return official_copy

    return apply


def write_shard(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + data)


@pytest.mark.parametrize(
    "shape", [[512.0, 256], [512.5, 256], ["512", "256"], "12", [True, 256], [float("inf"), 1], None]
)
def test_shape_of_anything_but_integers_names_the_tensor(edit_header, shape):
    message = refuse(edit_header(lambda header: header[NAME].update(shape=shape)))

    assert f"damaged header entry of tensor {NAME}" in message


@pytest.mark.parametrize("convert", [str, float, lambda offset: float("inf"), lambda offset: None])
def test_offsets_of_anything_but_integers_name_the_tensor(edit_header, convert):
    def change(header):
        header[NAME]["data_offsets"] = [convert(offset) for offset in header[NAME]["data_offsets"]]

    assert f"damaged header entry of tensor {NAME}" in refuse(edit_header(change))


@pytest.mark.parametrize("shift", [-2, 2])
def test_shifted_tensor_is_refused_with_both_offsets(edit_header, shift):
    def change(header):
        header[NAME]["data_offsets"] = [offset + shift for offset in header[NAME]["data_offsets"]]

    message = refuse(edit_header(change))

    assert "starts at byte" in message and "expected" in message


def test_two_tensors_on_the_same_bytes_are_refused(edit_header):
    twin = "layers.1.ffn.gate.tid2eid"

    def change(header):
        header["layers.0.ffn.gate.tid2eid"]["data_offsets"] = header[twin]["data_offsets"]

    assert "starts at byte" in refuse(edit_header(change))


def test_bytes_behind_the_last_tensor_are_refused(official_copy):
    with shard_of(official_copy).open("ab") as file:
        file.write(b"more")

    message = refuse(official_copy)

    assert shard_of(official_copy).name in message and "ends at byte" in message


def test_tensor_that_a_header_lists_twice_is_refused(official_copy):
    path = shard_of(official_copy)
    raw = path.read_bytes()
    data_start = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    header = raw[LENGTH_BYTES:data_start].strip()
    entry = json.dumps(json.loads(header)[NAME]).encode()
    write_shard(path, header[:-1] + b', "' + NAME.encode() + b'": ' + entry + b"}", raw[data_start:])

    assert f"{NAME!r} is there twice" in refuse(official_copy)


def test_tensor_in_two_shards_is_refused(edit_index, official_copy):
    path = shard_of(official_copy)
    entry = {"dtype": "BF16", "shape": [512, 256], "data_offsets": [0, 512 * 256 * 2]}
    write_shard(path.with_name("other.safetensors"), json.dumps({NAME: entry}).encode(), bytes(512 * 256 * 2))

    message = refuse(edit_index(lambda weight_map: weight_map.update({NAME: "other.safetensors"})))

    assert NAME in message and path.name in message


@pytest.mark.parametrize("file_name", ["config.json", INDEX_FILE, "shard"])
@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"\xff", b""])
def test_json_that_is_no_object_names_the_file(official_copy, file_name, text):
    path = shard_of(official_copy) if file_name == "shard" else official_copy / file_name
    if file_name == "shard":
        write_shard(path, text, b"")
    else:
        path.write_bytes(text)

    assert path.name in refuse(official_copy)


@pytest.mark.parametrize("shard", ["x" * 300, "a\0b", "", ".", ".."])
def test_index_of_an_impossible_file_name_names_the_tensor(edit_index, shard):
    message = refuse(edit_index(lambda weight_map: weight_map.update({NAME: shard})))

    assert NAME in message


@pytest.mark.parametrize("file_name", ["config.json", INDEX_FILE, "shard"])
def test_link_to_itself_is_refused(official_copy, file_name):
    path = shard_of(official_copy) if file_name == "shard" else official_copy / file_name
    path.unlink()
    os.symlink(path, path)

    assert path.name in refuse(official_copy)


def test_mtp_tensor_beside_the_newer_names_is_extra(transformers_dir, tmp_path):
    directory = Path(shutil.copytree(transformers_dir, tmp_path / "copy"))
    entry = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    write_shard(directory / "mtp.safetensors", json.dumps({"mtp.0.norm.weight": entry}).encode(), bytes(2))
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"]["mtp.0.norm.weight"] = "mtp.safetensors"
    (directory / INDEX_FILE).write_text(json.dumps(index))

    assert "extra tensor mtp.0.norm.weight" in refuse(directory)
