"""One answer for every stored format, and a slice equals the same slice of the whole."""

import pytest
import torch
from safetensors import safe_open

from dsv4_cluster.tools.make_checkpoint import make_checkpoint
from dsv4_cluster.weights.formats import FP4_BLOCK
from dsv4_cluster.weights.inventory import inventory
from dsv4_cluster.weights.reader import Checkpoint
from dsv4_kernels.quant.op import decode_e2m1, decode_ue8m0, unpack_e2m1

EXPERT = "layers.4.ffn.experts.5.w3.weight"


def read_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    return torch.int64 if checkpoint.specs[name].dtype == "I64" else torch.float32


@pytest.fixture(scope="module", params=["official", "bf16", "transformers"])
def checkpoint(request) -> Checkpoint:
    return Checkpoint.open(request.getfixturevalue(f"{request.param}_dir"))


@pytest.mark.parametrize("other", ["bf16_dir", "transformers_dir"])
def test_formats_hold_equal_values(official_dir, other, request):
    official, copy = Checkpoint.open(official_dir), Checkpoint.open(request.getfixturevalue(other))
    names = [name for name in official.specs if copy.has_mtp or not name.startswith("mtp.")]

    unequal = [
        name
        for name in names
        for dtype in [read_dtype(official, name)]
        if not torch.equal(official.read(name, dtype=dtype), copy.read(name, dtype=dtype))
    ]

    assert list(copy.specs) == names
    assert unequal == []


def test_bf16_reading_is_exact(official_dir):
    checkpoint = Checkpoint.open(official_dir)

    for name in (EXPERT, "layers.2.attn.wq_b.weight", "mtp.0.h_proj.weight"):
        exact = checkpoint.read(name, dtype=torch.float32)
        assert torch.equal(checkpoint.read(name, dtype=torch.bfloat16).float(), exact)


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 64),),
        (slice(37, 101), slice(3, 97)),  # starts inside a byte, a scale group and a block
        (slice(None), slice(33, 34)),
        (slice(127, 129), slice(127, 128)),
        (slice(5, 5),),
        (slice(None), slice(-31, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "layers.2.attn.wo_b.weight",
        "layers.3.attn.compressor.wkv.weight",
        "layers.0.hc_ffn_fn",
        "layers.5.ffn.shared_experts.w1.weight",
        "layers.4.ffn.experts.15.w2.weight",
        EXPERT,
    ],
)
def test_slice_equals_the_slice_of_the_whole(checkpoint, name, index):
    whole = checkpoint.read(name, dtype=torch.float32)

    part = checkpoint.read(name, index, dtype=torch.float32)

    assert torch.equal(part, whole[index])
    assert part.is_contiguous()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_slices_of_all_ranks_reassemble_every_tensor(official_dir, num_ranks):
    checkpoint = Checkpoint.open(official_dir)

    for name, spec in checkpoint.specs.items():
        dtype = read_dtype(checkpoint, name)
        whole = checkpoint.read(name, dtype=dtype)
        owned = [
            spec.owned_index(tp_rank=rank, tp_size=num_ranks, ep_rank=rank, ep_size=num_ranks)
            for rank in range(num_ranks)
        ]
        parts = [checkpoint.read(name, index, dtype=dtype) for index in owned if index is not None]
        if spec.expert_id is not None:
            assert len(parts) == 1, name
        if spec.shard.dim is None or spec.expert_id is not None:
            assert all(torch.equal(part, whole) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts, dim=spec.shard.dim), whole), name


def test_expert_equals_its_codes_times_scales(official_dir):
    checkpoint = Checkpoint.open(official_dir)
    rows, columns = checkpoint.specs[EXPERT].logical_shape
    codes = unpack_e2m1(checkpoint.read_raw(EXPERT).reshape(rows, columns // 2))
    scales = decode_ue8m0(checkpoint.read_raw(EXPERT.replace(".weight", ".scale")))
    scales = scales.reshape(rows, -1).repeat_interleave(FP4_BLOCK[1], dim=1)

    assert torch.equal(checkpoint.read(EXPERT, dtype=torch.float32), decode_e2m1(codes) * scales)


def test_safetensors_library_reads_the_same_files(official_dir):
    checkpoint = Checkpoint.open(official_dir)
    for path in sorted({tensor.path for tensor in checkpoint.stored_tensors.values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  the library's handle is no mapping
                raw = file.get_tensor(name).contiguous().flatten().view(torch.uint8)
                assert torch.equal(checkpoint.read_raw(name), raw), name


def test_fp8_experts_with_float_scales_are_told_by_dtype(damage, official_dir):
    """A repacked checkpoint: the config still says fp4. Source: spec 2.2."""
    weight = torch.randn(128, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(1, 2)

    def repack(tensors):
        tensors[EXPERT] = weight
        tensors[EXPERT.replace(".weight", ".scale")] = scale

    checkpoint = Checkpoint.open(damage(repack))

    expected = weight.float() * scale.repeat_interleave(128, dim=1)
    assert torch.equal(checkpoint.read(EXPERT, dtype=torch.float32), expected)
    assert torch.equal(
        checkpoint.read(EXPERT, (slice(3, 9), slice(100, 140)), dtype=torch.float32), expected[3:9, 100:140]
    )


def test_single_file_checkpoint_opens(official_dir, tmp_path):
    shards = sorted(official_dir.glob("*.safetensors"))
    assert len(shards) == 1, "the toy fits one shard"
    (tmp_path / "config.json").write_bytes((official_dir / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(shards[0].read_bytes())

    checkpoint = Checkpoint.open(tmp_path)

    assert set(checkpoint.specs) == {n for n, s in inventory(checkpoint.config).items() if s.scale_of is None}


def test_fingerprint_depends_on_weights_and_not_on_the_path(official_dir, official_copy, tmp_path):
    other_seed = make_checkpoint("toy", tmp_path / "other", seed=4).path  # same files and headers, other numbers

    fingerprints = [Checkpoint.open(path).fingerprint for path in (official_dir, official_copy, other_seed)]

    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0] != fingerprints[2]


def test_fingerprint_sees_one_changed_norm(official_copy):
    checkpoint = Checkpoint.open(official_copy)
    stored = checkpoint.stored_tensors["layers.3.attn.kv_norm.weight"]

    with stored.path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(b"\0\0")

    assert Checkpoint.open(official_copy).fingerprint != checkpoint.fingerprint
