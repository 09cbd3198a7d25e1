"""The largest sum of temporaries of one step.

The peak is that of the longest step: `max_num_batched_tokens` tokens at the end of a prompt of `max_model_len`. Tiled
products have fixed budgets, so a longer prompt adds only what grows with it: the gathered indexer keys. The phases of a
layer follow each other, so the largest one counts, on top of what is alive through all of them.

| phase      | alive besides the streams, the sub-layer's input, the rotations and, in attention, the latents    |
|------------|--------------------------------------------------------------------------------------------------|
| compressor | values and gates in fp32, rows of earlier steps behind them; in torch gathered by block, too     |
| indexer    | its queries, all keys of the prompt, one tile of scores; in torch the queries twice while they   |
|            | are rotated, or a tile of logits per head with the integers that scores are selected by          |
| attention  | queries and output; in torch two tiles of logits and picked rows, in C lists of rows             |
| experts    | a row per token and choice of one tile: inputs, hidden, fp32 outputs                             |
| streams    | in torch their fp32 products; in C they are mixed in place                                       |
| logits     | one tile of fp32 logits with its log-softmax, for prompt log-probabilities                       |

Which implementation a phase runs is the dispatcher's choice for its own op.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.engine.model_runner import LOGITS_TILE_BYTES
from dsv4_cluster.model.moe_layer import expert_tile_tokens
from dsv4_kernels.dispatch import choose

_SCORE_VALUES = 1 << 20  # fp32 logits that the indexer holds at once
_ATTENTION_VALUES = 1 << 22  # fp32 logits, or values of picked rows, that the torch attention holds at once
_TILE_ROWS = 128  # most queries of a tile in the torch attention
_SELECT_BYTES = 17  # per score while torch finds the top k: fp32 twice, an int64, a bool
_FP32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class StepKernels:
    """Which parts of a long step run in kernels with small temporaries; the others run as torch products."""

    pools_entries: bool  # compressor
    has_packed_weights: bool  # experts, projections of the compressor
    scores_and_selects: bool  # indexer
    attends_by_lists: bool  # attention
    mixes_streams: bool  # hyper-connections

    @property
    def are_native(self) -> bool:
        """No part of a step runs as torch products."""
        return all(getattr(self, field.name) for field in fields(self))

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Self:
        """What the dispatcher chooses. Triton's forms of the first four serve decoding, long chunks run in torch."""

        def is_native(op: str, dtype: torch.dtype = dtype) -> bool:
            return choose(op, device, dtype) == "native"

        return cls(
            pools_entries=is_native("compressor", torch.float32),  # whatever the model's dtype
            has_packed_weights=is_native("gemm"),
            scores_and_selects=is_native("indexer"),
            attends_by_lists=is_native("attention"),
            mixes_streams=choose("mhc", device, dtype) != "reference",
        )


def step_peak_bytes(
    config: ModelConfig, dtype: torch.dtype, kernels: StepKernels, *, num_tokens: int, context: int
) -> int:
    """Temporaries of a step of `num_tokens` tokens that ends at `context` tokens of a sequence. dtype: of the model."""
    size, dim, hidden = dtype.itemsize, config.head_dim, config.hidden_size
    streams = num_tokens * size * config.hc_mult * hidden
    alive = streams + num_tokens * (2 * hidden * size + config.qk_rope_head_dim * _INT64)
    latents = num_tokens * size * (config.q_lora_rank + 2 * dim)
    phases = (
        latents + _compressor_bytes(config, num_tokens, kernels),
        latents + _indexer_bytes(config, size, num_tokens, context, kernels),
        latents + _attention_bytes(config, size, num_tokens, context, kernels),
        _expert_bytes(config, size, num_tokens, kernels),
        streams if kernels.mixes_streams else 2 * num_tokens * _FP32 * config.hc_mult * hidden,
        3 * min(LOGITS_TILE_BYTES, num_tokens * config.vocab_size * _FP32),
    )
    return alive + max(phases)


def _compressor_bytes(config: ModelConfig, num_tokens: int, kernels: StepKernels) -> int:
    """Two channel sets: values and gates, then the gates' biases or, in torch, what a softmax over blocks takes."""
    return num_tokens * config.head_dim * _FP32 * (6 if kernels.pools_entries else 12)


def _indexer_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, kernels: StepKernels) -> int:
    num_keys = context // 4
    queries = num_tokens * config.index_n_heads * config.index_head_dim * size
    keys = num_keys * config.index_head_dim * size
    logits = _tile_values(config.index_n_heads * num_keys, num_tokens, _SCORE_VALUES)
    scores = -(-logits // config.index_n_heads)
    if kernels.scores_and_selects:
        return queries + keys + scores * _FP32
    wide_keys = num_keys * config.index_head_dim * _FP32 if size < _FP32 else 0
    return queries + max(queries, keys + wide_keys + max((logits + scores) * _FP32, scores * _SELECT_BYTES))


def _attention_bytes(config: ModelConfig, size: int, num_tokens: int, context: int, kernels: StepKernels) -> int:
    queries_and_out = 2 * num_tokens * config.num_attention_heads * config.head_dim * size
    if kernels.attends_by_lists:
        num_columns = config.sliding_window + 32 + 2 * (config.index_topk + 16)  # window rows; picks, and their rows
        return queries_and_out + num_tokens * num_columns * _INT64
    window = config.sliding_window + _TILE_ROWS
    num_picks = min(context // 4, config.index_topk)
    all_entries = config.num_attention_heads * (window + context // 128)  # logits of a query
    picked = max(config.num_attention_heads * (window + num_picks), num_picks * config.head_dim)  # or its own rows
    values = _tile_values(max(all_entries, picked), min(_TILE_ROWS, num_tokens), _ATTENTION_VALUES)
    return queries_and_out + 2 * values * _FP32


def _expert_bytes(config: ModelConfig, size: int, num_tokens: int, kernels: StepKernels) -> int:
    """Of one tile, and the output of all tokens."""
    num_pairs = min(num_tokens, expert_tile_tokens(config)) * config.num_experts_per_tok
    out = num_tokens * config.hidden_size * size
    if kernels.has_packed_weights:
        return out + num_pairs * (config.hidden_size * (size + _FP32) + config.moe_intermediate_size * size)
    # In torch: inputs and outputs, the latter in fp32 and again by pair; gate, up and hidden.
    return out + num_pairs * (config.hidden_size * (2 * size + 2 * _FP32) + 3 * config.moe_intermediate_size * size)


def _tile_values(row: int, num_rows: int, budget: int) -> int:
    """Most values in a tile of rows that get longer up to `row` with the prompt; one row may exceed the budget."""
    return max(row, min(row * num_rows, budget))
