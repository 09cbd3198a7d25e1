"""Every tensor of the official checkpoint format: name, stored shape and dtype, and who owns which part.

The reader validates against this list, the writer and the dummy generator walk it, and the model takes its shard
rules from it, so that a shape is written down once. Source: spec 2.1, 2.2, 2.3, 7.1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.weights.shard import REPLICATED, ShardRule

ExpertDtype = Literal["fp4", "fp8"]

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
FP8_BLOCK = (128, 128)  # one scale per 128 x 128 block of the weight
FP4_BLOCK = (1, 32)  # one scale per output row and 32 input columns
FP4_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor.

    shape: as stored. logical_shape: of the weight, [out, in]; a scale carries the logical shape of its weight.
    granule: logical elements along each dim that one stored element covers (FP4 bytes (1, 2), scales their block).
    shard: in logical coordinates. For routed experts `dim` 0 of axis "ep" is the expert index, which is not a dim of
        the stored tensor: it is the position `expert_id` in a stack of `num_experts`.
    num_experts: size of that stack, and for `tid2eid` the number of experts its ids name; 0 elsewhere.
    scale_block: block of the weight that shares one scale; None = no scale tensor. scale_dtype: of that tensor.
    scale_of: name of a scale's weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    logical_shape: tuple[int, ...]
    granule: tuple[int, ...]
    shard: ShardRule = REPLICATED
    scale_block: tuple[int, int] | None = None
    scale_dtype: str = "F8_E8M0"
    scale_of: str | None = None
    expert_id: int | None = None
    num_experts: int = 0

    @property
    def num_bytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Model parameters: two per FP4 byte; scales and the token-id tables count nothing. Source: spec 1.4."""
        return 0 if self.scale_of or self.dtype == "I64" else math.prod(self.logical_shape)

    @property
    def is_mtp(self) -> bool:
        """True for the tensors of the MTP module."""
        return self.name.startswith("mtp.")

    @property
    def scale_name(self) -> str:
        """Name of this weight's scale tensor (only when `scale_block` is set)."""
        return scale_name_of(self.name)

    def owned_index(
        self, *, tp_rank: int = 0, tp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
    ) -> tuple[slice, ...] | None:
        """Logical index of the part that a rank owns; None = nothing (another rank's expert).

        Raises: ConfigError when the axis does not divide the tensor.
        """
        full = tuple(slice(0, size) for size in self.logical_shape)
        dim = self.shard.dim
        if dim is None:
            return full
        try:
            if self.expert_id is not None:
                first, last = self.shard.bounds(self.num_experts, ep_rank, ep_size)
                return full if first <= self.expert_id < last else None
            owned = slice(*self.shard.bounds(self.logical_shape[dim], tp_rank, tp_size))
        except ConfigError as err:
            raise ConfigError(f"{self.name}: {err.message}") from err
        return (*full[:dim], owned, *full[dim + 1 :])

    def stored_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The stored elements that cover a logical index: starts rounded down, stops up, to whole granules."""
        return tuple(
            slice(part.start // step, -(-part.stop // step)) for part, step in zip(index, self.granule, strict=True)
        )


def scale_name_of(weight_name: str) -> str:
    """`layers.0.attn.wkv.weight` -> `layers.0.attn.wkv.scale`."""
    return weight_name.removesuffix(".weight") + ".scale"


def inventory(
    config: ModelConfig, *, expert_dtype: ExpertDtype = "fp4", include_mtp: bool = True
) -> dict[str, TensorSpec]:
    """All tensors of the official format of `config`, by official name, in model order.

    include_mtp: with the MTP modules that `config.has_mtp` promises; a DSpark drafter is never listed.
    """
    specs = list(_top_level(config))
    for layer_id in range(config.num_hidden_layers):
        specs += _layer(config, f"layers.{layer_id}.", layer_id, expert_dtype)
    if include_mtp and config.has_mtp:
        for mtp_id in range(config.num_nextn_predict_layers):
            specs += _layer(config, f"mtp.{mtp_id}.", config.num_hidden_layers + mtp_id, expert_dtype)
            specs += _mtp_extras(config, f"mtp.{mtp_id}.")
    return {spec.name: spec for spec in specs}


def _top_level(config: ModelConfig) -> Iterator[TensorSpec]:
    vocab_split = ShardRule(0, "tp")
    yield _plain("embed.weight", (config.vocab_size, config.hidden_size), "BF16", vocab_split)
    yield _plain("head.weight", (config.vocab_size, config.hidden_size), "BF16", vocab_split)
    yield _plain("norm.weight", (config.hidden_size,), "BF16")
    yield from _hyper_connection("hc_head", config, num_mixes=config.hc_mult, num_scales=1)


def _layer(config: ModelConfig, prefix: str, layer_id: int, expert_dtype: ExpertDtype) -> Iterator[TensorSpec]:
    # pre and post weights per stream, and the stream-to-stream matrix
    num_mixes = (2 + config.hc_mult) * config.hc_mult
    for block in ("attn", "ffn"):
        yield _plain(f"{prefix}{block}_norm.weight", (config.hidden_size,), "BF16")
        yield from _hyper_connection(f"{prefix}hc_{block}", config, num_mixes=num_mixes, num_scales=3)
    yield from _attention(config, prefix + "attn.", config.compress_ratio(layer_id))
    yield from _feed_forward(config, prefix + "ffn.", config.is_hash_layer(layer_id), expert_dtype)


def _hyper_connection(name: str, config: ModelConfig, *, num_mixes: int, num_scales: int) -> Iterator[TensorSpec]:
    yield _plain(f"{name}_fn", (num_mixes, config.hc_mult * config.hidden_size), "F32")
    yield _plain(f"{name}_base", (num_mixes,), "F32")
    yield _plain(f"{name}_scale", (num_scales,), "F32")


def _attention(config: ModelConfig, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    hidden, head_dim, num_heads = config.hidden_size, config.head_dim, config.num_attention_heads
    q_rank, o_rank = config.q_lora_rank, config.o_lora_rank * config.o_groups
    heads_per_group = num_heads // config.o_groups
    group_dim = heads_per_group * head_dim
    yield _plain(prefix + "attn_sink", (num_heads,), "F32", ShardRule(0, "tp", heads_per_group))
    yield from _fp8(prefix + "wq_a.weight", (q_rank, hidden))
    yield _plain(prefix + "q_norm.weight", (q_rank,), "BF16")
    yield from _fp8(prefix + "wq_b.weight", (num_heads * head_dim, q_rank), ShardRule(0, "tp", group_dim))
    yield from _fp8(prefix + "wkv.weight", (head_dim, hidden))
    yield _plain(prefix + "kv_norm.weight", (head_dim,), "BF16")
    yield from _fp8(prefix + "wo_a.weight", (o_rank, group_dim), ShardRule(0, "tp", config.o_lora_rank))
    yield from _fp8(prefix + "wo_b.weight", (hidden, o_rank), ShardRule(1, "tp", config.o_lora_rank))
    if ratio:
        yield from _compressor(prefix + "compressor.", ratio, head_dim, hidden)
    if ratio == 4:
        index_dim = config.index_n_heads * config.index_head_dim
        yield from _fp8(prefix + "indexer.wq_b.weight", (index_dim, q_rank))
        yield _plain(prefix + "indexer.weights_proj.weight", (config.index_n_heads, hidden), "BF16")
        yield from _compressor(prefix + "indexer.compressor.", ratio, config.index_head_dim, hidden)


def _compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Iterator[TensorSpec]:
    num_channels = dim * (2 if ratio == 4 else 1)  # CSA blocks overlap: one half for the next block, one for its own
    yield _plain(prefix + "ape", (ratio, num_channels), "F32")
    yield _plain(prefix + "wkv.weight", (num_channels, hidden), "BF16")
    yield _plain(prefix + "wgate.weight", (num_channels, hidden), "BF16")
    yield _plain(prefix + "norm.weight", (dim,), "BF16")


def _feed_forward(config: ModelConfig, prefix: str, is_hash: bool, expert_dtype: ExpertDtype) -> Iterator[TensorSpec]:
    hidden, inter, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _plain(prefix + "gate.weight", (num_experts, hidden), "BF16")
    if is_hash:
        table = _plain(prefix + "gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "I64")
        yield replace(table, num_experts=num_experts)
    else:
        yield _plain(prefix + "gate.bias", (num_experts,), "F32")
    for expert_id in range(num_experts):
        for matrix, shape in _expert_shapes(hidden, inter):
            yield from _expert(f"{prefix}experts.{expert_id}.{matrix}.weight", shape, expert_id, config, expert_dtype)
    for matrix, shape in _expert_shapes(hidden, inter * config.n_shared_experts):
        yield from _fp8(f"{prefix}shared_experts.{matrix}.weight", shape)


def _expert_shapes(hidden: int, inter: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "w1", (inter, hidden)  # gate projection
    yield "w2", (hidden, inter)  # down projection
    yield "w3", (inter, hidden)  # up projection


def _mtp_extras(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield from _fp8(prefix + "e_proj.weight", (hidden, hidden))
    yield from _fp8(prefix + "h_proj.weight", (hidden, hidden))
    for norm in ("enorm", "hnorm", "norm"):
        yield _plain(f"{prefix}{norm}.weight", (hidden,), "BF16")
    yield from _hyper_connection(prefix + "hc_head", config, num_mixes=config.hc_mult, num_scales=1)


def _plain(name: str, shape: tuple[int, ...], dtype: str, shard: ShardRule = REPLICATED) -> TensorSpec:
    return TensorSpec(name, shape, dtype, shape, (1,) * len(shape), shard)


def _fp8(name: str, shape: tuple[int, int], shard: ShardRule = REPLICATED) -> Iterator[TensorSpec]:
    yield TensorSpec(name, shape, "F8_E4M3", shape, (1, 1), shard, scale_block=FP8_BLOCK)
    yield _scale(name, shape, FP8_BLOCK, shard)


def _expert(
    name: str, shape: tuple[int, int], expert_id: int, config: ModelConfig, expert_dtype: ExpertDtype
) -> Iterator[TensorSpec]:
    is_fp4 = expert_dtype == "fp4"
    granule = (1, FP4_PER_BYTE) if is_fp4 else (1, 1)
    block = FP4_BLOCK if is_fp4 else FP8_BLOCK
    yield TensorSpec(
        name,
        (shape[0], shape[1] // granule[1]),
        "I8" if is_fp4 else "F8_E4M3",
        shape,
        granule,
        ShardRule(0, "ep"),
        scale_block=block,
        expert_id=expert_id,
        num_experts=config.n_routed_experts,
    )
    yield _scale(name, shape, block, ShardRule(0, "ep"), expert_id=expert_id, num_experts=config.n_routed_experts)


def _scale(
    weight_name: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    shard: ShardRule,
    *,
    expert_id: int | None = None,
    num_experts: int = 0,
) -> TensorSpec:
    stored = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return TensorSpec(
        scale_name_of(weight_name),
        stored,
        "F8_E8M0",
        shape,
        block,
        shard,
        scale_of=weight_name,
        expert_id=expert_id,
        num_experts=num_experts,
    )
