"""Model dimensions, read from a checkpoint's `config.json` under the checkpoint's own names, never from YAML.

Accepts the official form (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and the form that newer transformers
releases write (`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`). Source: spec 1.2, 1.3.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dsv4_cluster.config.checkpoint_json import parse_json_object
from dsv4_cluster.errors import CheckpointError

_Size = Annotated[int, Field(strict=True, ge=1)]
_Count = Annotated[int, Field(strict=True, ge=0)]
_PositiveFloat = Annotated[float, Field(gt=0)]
_RATIO_OF_LAYER_TYPE = {
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


class RopeScaling(BaseModel):
    """YaRN parameters; they apply only together with `compress_rope_theta`. Source: spec 3.3."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    rope_type: Literal["yarn"] = Field("yarn", validation_alias=AliasChoices("rope_type", "type"))
    factor: _PositiveFloat = 16.0
    original_max_position_embeddings: _Size = 65536
    beta_fast: _PositiveFloat = 32.0
    beta_slow: _PositiveFloat = 1.0


class ModelConfig(BaseModel):
    """The shape of a DeepSeek V4 model. Field names are those of the checkpoint's config.json."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    head_dim: _Size
    qk_rope_head_dim: _Size = 64
    q_lora_rank: _Size
    o_groups: _Size
    o_lora_rank: _Size
    sliding_window: _Size = 128
    compress_ratios: tuple[_Count, ...]  # one per main layer, then one per MTP layer (0)
    index_n_heads: _Size
    index_head_dim: _Size
    index_topk: _Size
    n_routed_experts: _Size
    n_shared_experts: _Size = 1
    num_experts_per_tok: _Size = 6
    moe_intermediate_size: _Size
    num_hash_layers: _Count = 3
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: _PositiveFloat
    swiglu_limit: _PositiveFloat = 10.0
    rms_norm_eps: _PositiveFloat = 1e-6
    hc_mult: _Size = 4
    hc_sinkhorn_iters: _Size = 20
    hc_eps: _PositiveFloat = 1e-6
    rope_theta: _PositiveFloat = 10000.0
    compress_rope_theta: _PositiveFloat = 160000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: _Size = 1048576
    num_nextn_predict_layers: _Count = 0
    bos_token_id: _Count = 0
    eos_token_id: _Count = 1
    has_dspark: bool = False  # the checkpoint's `mtp.*` is a DSpark drafter, not an MTP layer

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path) -> Self:
        """Read `config.json`. Raises: CheckpointError when it is absent, unreadable or not a V4 model."""
        path = Path(checkpoint_dir) / "config.json"
        try:
            text = path.read_bytes()
        except FileNotFoundError as err:
            raise CheckpointError(f"no config.json in {checkpoint_dir}: is this a checkpoint directory?") from err
        except OSError as err:
            raise CheckpointError(f"cannot read {path}: {err}") from err
        return cls.from_dict(parse_json_object(text, source=str(path)), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str = "config") -> Self:
        """Build from a parsed config.json. Raises: CheckpointError that names the field."""
        if raw.get("model_type") != "deepseek_v4":
            raise CheckpointError(
                f"{source}: model_type is {raw.get('model_type')!r}, only 'deepseek_v4' is supported "
                "(V3 and V4.1 are other architectures)"
            )
        try:
            return cls.model_validate(_official_names(raw))
        except ValidationError as err:
            first = err.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "config"
            raise CheckpointError(f"{source}: {field}: {first['msg']}") from err

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_entries = self.num_hidden_layers + self.num_nextn_predict_layers
        if len(self.compress_ratios) not in (self.num_hidden_layers, num_entries):
            raise ValueError(
                f"compress_ratios has {len(self.compress_ratios)} entries, expected {num_entries} "
                f"({self.num_hidden_layers} layers + {self.num_nextn_predict_layers} MTP)"
            )
        bad = [r for r in self.compress_ratios if r not in (0, 4, 128)]
        if bad:
            raise ValueError(f"compress_ratios holds {bad[0]}, expected only 0, 4 and 128")
        if self.scoring_func != "sqrtsoftplus":
            raise ValueError(f"scoring_func is {self.scoring_func!r}, only 'sqrtsoftplus' is supported")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups {self.o_groups} does not divide num_attention_heads {self.num_attention_heads}")
        if not 0 < self.qk_rope_head_dim <= min(self.head_dim, self.index_head_dim):
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} exceeds head_dim or index_head_dim")
        for name, token_id in (("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)):
            if token_id >= self.vocab_size:
                raise ValueError(f"{name} is {token_id}, not below vocab_size {self.vocab_size}")
        if (self.head_dim - self.qk_rope_head_dim) % 64:
            raise ValueError(f"head_dim - qk_rope_head_dim is {self.nope_head_dim}, not a multiple of 64")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} exceeds {self.n_routed_experts} experts")
        return self

    def compress_ratio(self, layer_id: int) -> int:
        """Tokens per compressed entry: 0 (none), 4 or 128. MTP layers (num_hidden_layers and up) have 0."""
        return self.compress_ratios[layer_id] if layer_id < len(self.compress_ratios) else 0

    def is_hash_layer(self, layer_id: int) -> bool:
        """True when the layer routes by the token-id table instead of by score."""
        return layer_id < self.num_hash_layers

    @property
    def nope_head_dim(self) -> int:
        """Leading dims of a head that are not rotated (448 in the shipped shapes)."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def has_mtp(self) -> bool:
        """True when the config promises a usable MTP layer."""
        return self.num_nextn_predict_layers > 0 and not self.has_dspark


class _Rope(BaseModel):
    """One entry of the newer `rope_parameters`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    rope_type: Literal["default", "yarn"] = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None


class _RopeParameters(_Rope):
    """`rope_parameters`: one entry per kind of layer, or a single one that holds for the compressed layers."""

    main: _Rope = _Rope()
    compress: _Rope | None = None


class _Variants(BaseModel):
    """Fields that have several forms, checked before they are folded into the official one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    head_dim: _Size
    num_nextn_predict_layers: _Count = 0
    eos_token_id: _Count | Annotated[list[_Count], Field(min_length=1)] = 1
    layer_types: list[str] | None = None
    compress_rates: dict[str, int] = Field(default_factory=dict)
    mlp_layer_types: list[str] | None = None
    rope_parameters: _RopeParameters | None = None
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)


def _official_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Fold the newer transformers names into the official ones. Raises: ValidationError."""
    out = {key: value for key, value in raw.items() if value is not None}
    variants = _Variants.model_validate(out)
    out["has_dspark"] = any(key.startswith("dspark_") for key in raw)
    if isinstance(variants.eos_token_id, list):
        out["eos_token_id"] = variants.eos_token_id[0]
    if "compress_ratios" not in out and variants.layer_types is not None:
        out["compress_ratios"] = [
            0 if kind == "sliding_attention" else variants.compress_rates.get(kind, _RATIO_OF_LAYER_TYPE.get(kind, -1))
            for kind in variants.layer_types
        ] + [0] * variants.num_nextn_predict_layers
    if "num_hash_layers" not in out and variants.mlp_layer_types is not None:
        out["num_hash_layers"] = sum(kind == "hash_moe" for kind in variants.mlp_layer_types)
    rope = variants.rope_parameters
    if rope is not None:
        compress = rope.compress or rope
        thetas = {"rope_theta": rope.main.rope_theta, "compress_rope_theta": compress.rope_theta}
        out |= {name: theta for name, theta in thetas.items() if theta is not None}
        if compress.rope_type == "yarn":
            out.setdefault("rope_scaling", compress.model_dump())
    if "qk_rope_head_dim" not in out and variants.partial_rotary_factor is not None:
        out["qk_rope_head_dim"] = round(variants.head_dim * variants.partial_rotary_factor)
    return out
