"""Batches on disk: who may run one, and what a crash in any place leaves behind."""

import io
import json
import os

import pytest

from dsv4_cluster.batches.batch_store import BatchStore
from dsv4_cluster.batches.claim import AnswerLine
from dsv4_cluster.batches.file_store import FileStore
from dsv4_cluster.batches.layout import BATCH_PREFIX, FILE_PREFIX, is_id, new_id
from dsv4_cluster.batches.record import BatchRecord
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.errors import Dsv4Error, OverloadedError

TENANT = ".."  # a name that a careless path would leave the directory by


class Disk:
    def __init__(self, root):
        self.root = root
        config = BatchesConfig(dir=str(root), max_batches_per_tenant=2, max_bytes_per_tenant=4096)
        self.files = FileStore(root, config)
        self.batches = BatchStore(root, self.files, config)

    def create(self):
        file = self.files.add(TENANT, io.BytesIO(b"one\n\ntwo\n"), filename="in", purpose="batch")
        record = BatchRecord(
            batch_id=new_id(BATCH_PREFIX),
            tenant=TENANT,
            key_name="",
            endpoint="/v1/completions",
            input_file_id=file.file_id,
            output_file_id=new_id(FILE_PREFIX),
            error_file_id=new_id(FILE_PREFIX),
            completion_window="24h",
            metadata=None,
            created_s=1,
            expires_s=2,
        )
        assert self.batches.create(record)
        return record


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


def answer(custom_id, *, is_error=False):
    return AnswerLine(json.dumps({"custom_id": custom_id}).encode() + b"\n", is_error)


def test_a_batch_has_one_owner_at_a_time(disk):
    record = disk.create()

    claim = disk.batches.claim(TENANT, record.batch_id)
    assert claim.record == record and list(claim.input_lines()) == [(1, b"one\n"), (3, b"two\n")]
    assert disk.batches.claim(TENANT, record.batch_id) is None
    claim.release()
    again = disk.batches.claim(TENANT, record.batch_id)

    assert again is not None
    again.finish("completed")
    again.release()
    assert disk.batches.claim(TENANT, record.batch_id) is None and disk.batches.unfinished() == []
    assert disk.batches.get(TENANT, record.batch_id).status == "completed"


@pytest.mark.parametrize("torn", [b'{"custom_id": "b"', b'{"custom_id": "b"}', b"\0\0\0\n" + b'{"custom_id": "c"}\n'])
def test_a_torn_line_is_removed_and_whole_ones_stay(disk, torn):
    record = disk.create()
    claim = disk.batches.claim(TENANT, record.batch_id)
    claim.append([answer("a"), answer("x", is_error=True)])
    claim.release()
    with disk.files.contents(TENANT, record.output_file_id).open("ab") as file:
        file.write(torn)

    claim = disk.batches.claim(TENANT, record.batch_id)
    answered = claim.answered()
    claim.append([answer("b")])
    claim.finish("completed")
    claim.release()

    assert (answered.custom_ids, answered.num_completed, answered.num_failed) == ({"a", "x"}, 1, 1)
    with disk.files.open(TENANT, record.output_file_id) as contents:
        assert [json.loads(line)["custom_id"] for line in contents] == ["a", "b"]
    assert disk.files.get(TENANT, record.output_file_id).num_bytes == 2 * len(answer("a").text)


def test_results_are_no_files_before_the_batch_is_over(disk):
    record = disk.create()
    claim = disk.batches.claim(TENANT, record.batch_id)
    claim.append([answer("a")])

    assert disk.files.get(TENANT, record.output_file_id) is None
    assert disk.files.open(TENANT, record.output_file_id) is None
    claim.finish("cancelled")
    claim.release()

    over = disk.batches.get(TENANT, record.batch_id)
    assert (over.has_output, over.has_errors) == (True, False)
    assert disk.files.get(TENANT, record.output_file_id).filename == f"{record.batch_id}_output.jsonl"
    assert disk.files.get(TENANT, record.error_file_id) is None


def test_a_crash_while_a_batch_is_taken_in_or_closed_leaves_nothing_to_run(disk):
    half, closed = disk.create(), disk.create()
    (disk.root / "batches" / f"t-{TENANT}" / half.batch_id / "batch.json").unlink()
    claim = disk.batches.claim(TENANT, closed.batch_id)
    claim.enter("completed")  # and no more
    claim.release()

    assert disk.batches.unfinished() == [(TENANT, half.batch_id), (TENANT, closed.batch_id)]
    assert [disk.batches.claim(TENANT, one.batch_id) for one in (half, closed)] == [None, None]

    assert disk.batches.unfinished() == []
    assert disk.batches.get(TENANT, half.batch_id) is None


def test_a_batch_over_makes_room_and_one_under_way_does_not(disk):
    first, _ = disk.create(), disk.create()

    with pytest.raises(OverloadedError, match="max_batches_per_tenant is 2"):
        disk.create()
    claim = disk.batches.claim(TENANT, first.batch_id)
    claim.finish("completed")
    claim.release()
    third = disk.create()

    assert disk.batches.get(TENANT, first.batch_id) is None
    assert disk.batches.get(TENANT, third.batch_id) == third


def test_a_request_to_cancel_shows_at_once_and_ends_with_the_batch(disk):
    record = disk.create()
    disk.batches.ask_to_cancel(TENANT, record.batch_id)
    claim = disk.batches.claim(TENANT, record.batch_id)

    assert disk.batches.get(TENANT, record.batch_id).status == "cancelling"
    claim.finish("cancelled")
    claim.release()

    over = disk.batches.get(TENANT, record.batch_id)
    assert over.status == "cancelled" and over.reached_s.keys() == {"cancelling", "cancelled"}


def test_stored_bytes_of_a_tenant_are_bounded_and_cut_off_uploads_are_removed(disk):
    for text in (b"x" * 2000, b"y" * 2000):  # the one that reaches the limit is taken
        disk.files.add(TENANT, io.BytesIO(text), filename="x", purpose="batch")

    directory = disk.files.contents(TENANT, "x").parent
    old, young = directory / ".old", directory / ".young"
    for path in (old, young):
        path.write_bytes(b"half an upload")
    os.utime(old, (1, 1))

    with pytest.raises(OverloadedError, match="max_bytes_per_tenant is 4096"):
        disk.files.add(TENANT, io.BytesIO(b"z"), filename="x", purpose="batch")
    disk.files.add("other", io.BytesIO(b"z"), filename="x", purpose="batch")
    assert (old.exists(), young.exists()) == (False, True)


def test_ids_of_others_are_no_paths():
    assert is_id(new_id(FILE_PREFIX), FILE_PREFIX) and new_id(BATCH_PREFIX) < "batch_9"
    for text in ("", "file-", "file-../../x", new_id(BATCH_PREFIX), new_id(FILE_PREFIX) + "\n", "file-" + "A" * 32):
        assert not is_id(text, FILE_PREFIX), text


def test_a_damaged_batch_is_named_by_its_file_and_hides_no_other(disk):
    damaged, whole = disk.create(), disk.create()
    path = disk.root / "batches" / f"t-{TENANT}" / damaged.batch_id / "batch.json"

    for text in (b"", b"[]", b'{"batch_id": 1}', b"\xff"):
        path.write_bytes(text)
        for call in (disk.batches.get, disk.batches.claim):
            with pytest.raises(Dsv4Error, match=f"{damaged.batch_id}/batch.json is damaged"):
                call(TENANT, damaged.batch_id)
    claim = disk.batches.claim(TENANT, whole.batch_id)

    assert claim is not None
    claim.release()
