"""The public transformers implementation of the same checkpoint, in fp32: the oracle of the model tests.

Expert and entry selection is discontinuous: where two candidates score almost equally, two correct programs may choose
differently and then disagree by far more than rounding. `OracleRun.margins` says where; tests use prompts without such
places (`clear_prompt`) or stop comparing there.

Weights are read through our checkpoint reader (plain values, no quantised loader of the oracle) and copied under the
oracle's own names (spec 2.5). Attention and experts run in their plain eager forms.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_cluster.weights.reader import Checkpoint

_TOP_LEVEL = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
# Official module or parameter below `layers.{n}.` -> the oracle's; the longest prefix wins.
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_": "attn_hc.",
    "hc_ffn_": "ffn_hc.",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}


# Smallest relative gap that counts as a clear choice. Two fp32 programs differ by up to a few 1e-6 in these scores.
CLEAR_MARGIN = 1e-5


@dataclass(frozen=True, slots=True)
class OracleRun:
    """One prefill of the oracle."""

    logprobs: torch.Tensor  # [T, V] fp32, after every token
    margins: torch.Tensor  # [T] fp32, smallest gap of a row's selections, relative to its largest score

    @property
    def num_clear_rows(self) -> int:
        """Rows before the first selection that is too close to call."""
        unclear = (self.margins < CLEAR_MARGIN).nonzero()
        return int(unclear[0]) if len(unclear) else len(self.margins)


@dataclass(frozen=True, slots=True)
class GreedyStep:
    """One greedy token of the oracle."""

    token_id: int
    gap: float  # log-probability of the best minus the second best


def load_oracle(checkpoint_dir: str | Path) -> DeepseekV4ForCausalLM:
    """The oracle with the weights of a checkpoint directory, fp32, ready to run."""
    checkpoint = Checkpoint.open(checkpoint_dir)
    raw = json.loads((Path(checkpoint_dir) / "config.json").read_text())
    for key in ("quantization_config", "torch_dtype", "dtype", "expert_dtype"):
        raw.pop(key, None)
    config = DeepseekV4Config(**raw)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    config.use_cache = False
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    state = _state_dict(checkpoint)
    rotary = dict(DeepseekV4ForCausalLM(_without_layers(config)).named_buffers())
    model.load_state_dict(state, strict=True, assign=True)
    for module in model.modules():
        for buffer_name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:  # rotary frequencies are not part of the state dict; all modules hold the same ones
                setattr(module, buffer_name, rotary[f"model.rotary_emb.{buffer_name}"])
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model.eval()


@torch.inference_mode()
def oracle_run(model: DeepseekV4ForCausalLM, token_ids: list[int]) -> OracleRun:
    """Prefill one prompt without a cache."""
    margins = torch.full((len(token_ids),), float("inf"))
    handles = _watch_selections(model, margins)
    try:
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return OracleRun(logits.float().log_softmax(-1), margins)


def oracle_logprobs(model: DeepseekV4ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities after every token of one prompt. Returns: [T, V] fp32."""
    return oracle_run(model, token_ids).logprobs


def clear_prompt(model: DeepseekV4ForCausalLM, num_tokens: int, *, seed: int = 0, vocab_size: int) -> list[int]:
    """Random token ids, redrawn until every selection of the oracle is clear."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        token_ids: list[int] = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
        if oracle_run(model, token_ids).num_clear_rows == num_tokens:
            return token_ids
    raise AssertionError(f"no clear prompt of {num_tokens} tokens from seed {seed}")


@torch.inference_mode()
def oracle_greedy(model: DeepseekV4ForCausalLM, token_ids: list[int], num_tokens: int) -> list[GreedyStep]:
    """Greedy continuation, every step a fresh prefill without a cache."""
    ids, steps = list(token_ids), []
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.float().log_softmax(-1).topk(2)
        steps.append(GreedyStep(int(best.indices[0]), float(best.values[0] - best.values[1])))
        ids.append(steps[-1].token_id)
    return steps


def oracle_name(official: str) -> str:
    """`layers.3.attn.wq_a.weight` -> `model.layers.3.self_attn.q_a_proj.weight` (not for routed experts)."""
    if official in _TOP_LEVEL:
        return _TOP_LEVEL[official]
    _, layer, rest = official.split(".", 2)
    prefix = max((key for key in _LAYER if rest.startswith(key)), key=len)
    return f"model.layers.{layer}.{_LAYER[prefix]}{rest.removeprefix(prefix)}"


def _watch_selections(model: DeepseekV4ForCausalLM, margins: torch.Tensor) -> list[RemovableHandle]:
    """Hooks that lower `margins` [T] to the gap of every expert and entry selection."""
    position = torch.arange(len(margins))

    def lower(scores: torch.Tensor, topk: int, num_candidates: torch.Tensor) -> None:
        if scores.shape[1] <= topk:
            return
        hidden = torch.arange(scores.shape[1]) >= num_candidates[:, None]
        best = scores.masked_fill(hidden, float("-inf")).topk(topk + 1).values  # [T, topk + 1]
        scale = scores.masked_fill(hidden, 0.0).abs().amax(1)
        gap = (best[:, -2] - best[:, -1]) / scale
        torch.minimum(margins, torch.where(num_candidates > topk, gap, float("inf")), out=margins)

    def on_router(module: nn.Module, _: object, out: tuple[torch.Tensor, ...]) -> None:
        scores = module.score_fn(out[0]) + module.e_score_correction_bias
        lower(scores, module.top_k, torch.full_like(position, scores.shape[1]))

    handles = []
    for layer in model.model.layers:
        if hasattr(layer.mlp.gate, "e_score_correction_bias"):
            handles.append(layer.mlp.gate.register_forward_hook(on_router))
        indexer = getattr(layer.self_attn.compressor, "indexer", None)
        if indexer is not None:
            num_visible = (position + 1) // indexer.compress_rate
            handles.append(
                indexer.scorer.register_forward_hook(
                    lambda _m, _i, out, k=indexer.index_topk, n=num_visible: lower(out[0], k, n)
                )
            )
    return handles


def _state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    config = checkpoint.config

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(name, dtype=torch.float32)

    state = {}
    for name in checkpoint.specs:
        if ".experts." in name or name.startswith("mtp."):
            continue
        dtype = torch.int64 if name.endswith("tid2eid") else torch.float32
        state[oracle_name(name)] = checkpoint.read(name, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        stem = f"layers.{layer}.ffn.experts"
        experts = range(config.n_routed_experts)
        gate_up = [torch.cat((read(f"{stem}.{e}.w1.weight"), read(f"{stem}.{e}.w3.weight"))) for e in experts]
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(
            [read(f"{stem}.{e}.w2.weight") for e in experts]
        )
    return state


def _without_layers(config: DeepseekV4Config) -> DeepseekV4Config:
    """The same config with one small layer, to compute rotary buffers cheaply."""
    return DeepseekV4Config(**{**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8, "n_routed_experts": 1})
