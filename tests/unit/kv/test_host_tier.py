"""The second tier gives back what was stored or nothing, within its limits, whatever happens to its files."""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.kv.host_prefixes import HostPrefix, HostPrefixes
from dsv4_cluster.kv.host_tier import HostTier

calls = st.lists(
    st.tuples(st.sampled_from(["put", "get", "discard"]), st.integers(0, 5), st.integers(1, 60)), max_size=40
)


def blob(seed: int, num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def files_of(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@settings(max_examples=60, deadline=None)
@given(calls, st.integers(0, 100), st.integers(0, 100))
def test_a_blob_comes_back_as_stored_until_it_is_reported_lost(calls, memory_bytes, disk_bytes):
    tier = HostTier(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
    stored: dict[bytes, torch.Tensor] = {}
    for i, (name, number, num_bytes) in enumerate(calls):
        key = b"%d" % number
        if name == "put" and key not in stored:
            stored[key] = blob(i, num_bytes)
            for lost in tier.put(key, stored[key].clone()):
                del stored[lost]
        elif name == "get":
            found = tier.get(key)
            assert (found is None) == (key not in stored)
            assert found is None or torch.equal(found[0], stored[key])
        elif name == "discard":
            tier.discard(key)
            stored.pop(key, None)
        tier.check()
        assert {k for k in (b"%d" % n for n in range(6)) if k in tier} == stored.keys()
    assert tier.counters.num_failures == 0


def test_memory_gives_to_the_disk_and_the_disk_to_nobody(tmp_path):
    tier = HostTier(memory_bytes=100, disk_bytes=100, directory=tmp_path)

    lost = [tier.put(b"%d" % i, blob(i, 50)) for i in range(5)]

    assert lost == [[], [], [], [], [b"0"]]
    assert [tier.get(b"%d" % i)[1] for i in range(1, 5)] == [True, True, False, False]
    assert len(files_of(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "longer", "flipped bit", "empty", "gone"],
)
def test_a_damaged_file_is_a_miss_and_is_forgotten(damage, tmp_path):
    tier = HostTier(memory_bytes=0, disk_bytes=1000, directory=tmp_path)
    tier.put(b"key", blob(1, 64))
    damage(files_of(tmp_path)[0])

    assert tier.get(b"key") is None
    assert b"key" not in tier and tier.disk_used == 0 and files_of(tmp_path) == []
    assert tier.counters.num_failures == 1
    assert tier.put(b"key", blob(2, 64)) == []
    tier.check()


def test_damaged_memory_is_a_miss():
    tier = HostTier(memory_bytes=1000)
    data = blob(1, 64)
    tier.put(b"key", data)
    data[3] ^= 1

    assert tier.get(b"key") is None
    assert tier.counters.num_failures == 1


def test_two_files_that_changed_places_do_not_verify(tmp_path):
    tier = HostTier(memory_bytes=0, disk_bytes=1000, directory=tmp_path)
    tier.put(b"a", blob(1, 64))
    tier.put(b"b", blob(2, 64))
    one, other = files_of(tmp_path)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)

    assert tier.get(b"a") is None and tier.get(b"b") is None


def test_a_disk_that_cannot_be_written_loses_the_blob_and_raises_nothing(tmp_path):
    tier = HostTier(memory_bytes=0, disk_bytes=1000, directory=tmp_path)
    next(tmp_path.iterdir()).rmdir()

    assert tier.put(b"key", blob(1, 64)) == [b"key"]
    assert tier.counters.num_failures == 1


def test_the_files_go_with_the_tier(tmp_path):
    tier = HostTier(memory_bytes=0, disk_bytes=1000, directory=tmp_path)
    tier.put(b"key", blob(1, 64))

    del tier
    gc.collect()

    assert list(tmp_path.iterdir()) == []


def test_an_entry_without_one_of_its_blobs_is_forgotten_and_its_own_blobs_are_named():
    prefixes = HostPrefixes()
    prefixes.add(HostPrefix(b"short", 256, (b"p0", b"s0")))
    prefixes.add(HostPrefix(b"long", 512, (b"p0", b"p1", b"s1")))

    unused = prefixes.lose([b"p1"])

    assert unused == [b"s1"]
    assert prefixes.find([b"x", b"short", b"y", b"long"], 1000, above=0) == HostPrefix(b"short", 256, (b"p0", b"s0"))
    assert prefixes.find([b"x", b"short"], 1000, above=256) is None
    assert sorted(prefixes.lose([b"p0"])) == [b"s0"]
    assert len(prefixes) == 0
