"""Model dimensions, read from a checkpoint's `config.json` under the checkpoint's own names, never from YAML.

Accepts the official form (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and the form that newer transformers
releases write (`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`). Source: spec 1.2, 1.3.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from dsv4_cluster.errors import CheckpointError

LayerKind = Literal["swa", "csa", "hca"]
_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": "sliding_attention",
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


class RopeScaling(BaseModel):
    """YaRN parameters; they apply only together with `compress_rope_theta`. Source: spec 3.3."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class ModelConfig(BaseModel):
    """The shape of a DeepSeek V4 model. Field names are those of the checkpoint's config.json."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int = 64
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int = 128
    compress_ratios: tuple[int, ...]  # one per main layer, then one per MTP layer (0)
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    has_dspark: bool = False  # the checkpoint's `mtp.*` is a DSpark drafter, not an MTP layer

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path) -> Self:
        """Read `config.json`. Raises: CheckpointError when it is absent, unreadable or not a V4 model."""
        path = Path(checkpoint_dir) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError as err:
            raise CheckpointError(f"no config.json in {checkpoint_dir}: is this a checkpoint directory?") from err
        except (OSError, ValueError) as err:
            raise CheckpointError(f"cannot read {path}: {err}") from err
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object")
        return cls.from_dict(raw, source=str(path))

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
        if (self.head_dim - self.qk_rope_head_dim) % 64:
            raise ValueError(f"head_dim - qk_rope_head_dim is {self.nope_head_dim}, not a multiple of 64")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} exceeds {self.n_routed_experts} experts")
        return self

    def layer_kind(self, layer_id: int) -> LayerKind:
        """Attention kind of a layer. Layers num_hidden_layers and up are MTP layers, which are window-only."""
        return {0: "swa", 4: "csa", 128: "hca"}[self.compress_ratio(layer_id)]  # type: ignore[return-value]

    def compress_ratio(self, layer_id: int) -> int:
        """Tokens per compressed entry: 0 (none), 4 or 128."""
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


def _official_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Fold the newer transformers names into the official ones."""
    out = {key: value for key, value in raw.items() if value is not None}
    out["has_dspark"] = any(key.startswith("dspark_") for key in raw)
    if isinstance(out.get("eos_token_id"), list):
        out["eos_token_id"] = out["eos_token_id"][0]
    num_mtp = int(out.get("num_nextn_predict_layers", 0))
    if "compress_ratios" not in out and "layer_types" in out:
        rates = out.get("compress_rates", {})
        out["compress_ratios"] = [
            0 if kind == "sliding_attention" else rates.get(kind, _RATIO_OF_LAYER_TYPE.get(kind, -1))
            for kind in out["layer_types"]
        ] + [0] * num_mtp
    if "num_hash_layers" not in raw and "mlp_layer_types" in out:
        out["num_hash_layers"] = sum(kind == "hash_moe" for kind in out["mlp_layer_types"])
    rope = out.get("rope_parameters")
    if isinstance(rope, dict):
        main, compress = rope.get("main", {}), rope.get("compress", rope)
        out["rope_theta"] = main.get("rope_theta", out.get("rope_theta", 10000.0))
        out["compress_rope_theta"] = compress.get("rope_theta", out.get("compress_rope_theta", 160000.0))
        if compress.get("rope_type", compress.get("type")) == "yarn":
            out.setdefault("rope_scaling", compress)
    if "qk_rope_head_dim" not in raw and "partial_rotary_factor" in out:
        out["qk_rope_head_dim"] = round(out["head_dim"] * out["partial_rotary_factor"])
    return out
