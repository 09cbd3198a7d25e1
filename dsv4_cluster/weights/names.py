"""Official tensor names and those that the transformers library uses. Source: spec 2.5.

Its modules fuse the routed experts of a layer: `gate_up_proj` [E, 2I, D] holds each expert's w1 rows, then its w3
rows; `down_proj` [E, D, I] holds w2. Its `save_pretrained` (5.23) translates back only in part: official names below a
`model.` prefix, experts apart, the embedding and the final hyper-connection under their module names.
"""

import re
from dataclasses import dataclass

from dsv4_cluster.weights.inventory import TensorSpec, scale_name_of

_TOP_LEVEL = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_COMPRESSOR = {"wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight", "ape": "position_bias"}
_COMPRESSOR |= {"norm.weight": "kv_norm.weight"}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{block}_{part}": f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    **{f"attn.compressor.{ours}": f"self_attn.compressor.{theirs}" for ours, theirs in _COMPRESSOR.items()},
    **{
        f"attn.indexer.compressor.{ours}": f"self_attn.compressor.indexer.{theirs}"
        for ours, theirs in _COMPRESSOR.items()
    },
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
# matrix -> fused tensor, position among the equal row blocks of an expert, number of those blocks
_FUSED_EXPERTS = {"w1": ("gate_up_proj", 0, 2), "w2": ("down_proj", 0, 1), "w3": ("gate_up_proj", 1, 2)}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an official weight lies among the stored tensors.

    expert_id: index into the leading dim of a fused tensor, None = the whole tensor is this weight.
    row_block, num_row_blocks: which of an expert's equal row blocks in the fused tensor is this weight.
    """

    name: str
    scale_name: str
    expert_id: int | None = None
    row_block: int = 0
    num_row_blocks: int = 1

    def stored_shape(self, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Shape of the stored tensor when the weight alone would be stored with `shape`."""
        if self.expert_id is None:
            return shape
        return (num_experts, shape[0] * self.num_row_blocks, *shape[1:])


def official_placement(spec: TensorSpec) -> Placement:
    """The official format stores every weight under its own name."""
    return Placement(spec.name, spec.scale_name)


def transformers_placement(spec: TensorSpec) -> Placement:
    """Where the transformers format keeps an official weight of the main model."""
    name = transformers_name(spec.name)
    if spec.expert_id is None:
        return Placement(name, name + "_scale_inv")
    matrix = spec.name.split(".")[-2]
    _, row_block, num_row_blocks = _FUSED_EXPERTS[matrix]
    return Placement(name, name + "_scale_inv", spec.expert_id, row_block, num_row_blocks)


def saved_placement(spec: TensorSpec) -> Placement:
    """Where `save_pretrained` of transformers 5.23 keeps an official weight of the main model."""
    name = saved_name(spec.name)
    return Placement(name, scale_name_of(name))


def saved_name(official: str) -> str:
    """`layers.3.attn.wkv.weight` -> `model.layers.3.attn.wkv.weight`. Raises: KeyError outside the main model."""
    if not official.startswith("layers."):
        return official if official == "head.weight" else _TOP_LEVEL[official]
    return "model." + official.replace(".attn.kv_norm.", ".attn.norm.")


def transformers_name(official: str) -> str:
    """`layers.3.attn.wkv.weight` -> `model.layers.3.self_attn.kv_proj.weight`; experts give their fused tensor.

    Scales map like their weight: `*.weight_scale_inv`, fused experts `*_proj_scale_inv`.
    Raises: KeyError for a name outside the main model.
    """
    if official.endswith(".scale"):
        return transformers_name(official.removesuffix(".scale") + ".weight") + "_scale_inv"
    layer = _LAYER.fullmatch(official)
    if layer is None:
        return _TOP_LEVEL[official]
    layer_id, rest = layer.groups()
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        return f"model.layers.{layer_id}.mlp.experts.{_FUSED_EXPERTS[expert[2]][0]}"
    return f"model.layers.{layer_id}.{_IN_LAYER[rest]}"
