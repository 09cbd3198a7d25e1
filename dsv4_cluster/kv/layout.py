"""What the cache of one model looks like: row formats and ring sizes per layer, bytes, and the identity of the payload.

| pool        | layers   | row                              | addressed by                                  |
|-------------|----------|----------------------------------|-----------------------------------------------|
| window      | all      | latent of one token              | sequence slot, position mod window ring       |
| compressed  | CSA, HCA | one entry per 4 or 128 tokens    | page of 256 tokens, entry within it           |
| indexer     | CSA      | one key per 4 tokens             | the same pages                                |
| state       | CSA, HCA | fp32 kv and gate of one token    | sequence slot, position mod state ring        |
| last_hidden | MTP      | main model's streams of a token  | sequence slot, position mod hidden ring       |

Source: spec 5.2, 6.1 to 6.3.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Self

import torch

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_kernels.kv.row_codec import section_bytes
from dsv4_kernels.kv.rows import RowFormat, page_bytes

PAYLOAD_VERSION = 2  # part of layout_id; raised when stored bytes change their meaning without changing their format


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Row formats of one layer; None where the layer has no such pool."""

    ratio: int  # 0 = window only, 4 = CSA, 128 = HCA
    window: RowFormat
    compressed: RowFormat | None = None
    indexer: RowFormat | None = None
    state: RowFormat | None = None
    indexer_state: RowFormat | None = None
    hidden: RowFormat | None = None

    @property
    def is_mtp(self) -> bool:
        """A draft layer: its row of position i also depends on token i + 1."""
        return self.hidden is not None

    def formats(self, pool: str) -> tuple[RowFormat, ...]:
        """Formats of the rows that travel under one pool name of protocol.handoff.POOLS, in payload order."""
        formats = {
            "window": (self.window,),
            "compressed": (self.compressed,),
            "indexer": (self.indexer,),
            "state": (self.state, self.indexer_state),
            "last_hidden": (self.hidden,),
        }[pool]
        return tuple(fmt for fmt in formats if fmt is not None)

    @property
    def entries_per_page(self) -> int:
        """Compressed entries of one page. Only for CSA and HCA layers."""
        return PAGE_TOKENS // self.ratio

    @property
    def num_state_blocks(self) -> int:
        """Blocks of `ratio` tokens that one entry pools: CSA overlaps with the previous block. Source: spec 4.4."""
        return 2 if self.ratio == 4 else 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of every layer's cache, main layers first, then MTP layers."""

    layers: tuple[LayerLayout, ...]
    sliding_window: int  # tokens that attention sees, the query token included
    headroom: int  # ring rows beyond the live ones, so that rejected drafts never overwrite a live row
    layout_id: str  # equal exactly when one engine can read the live bytes of the other

    @classmethod
    def build(
        cls, config: ModelConfig, kv: KVConfig, dtype: torch.dtype, *, num_mtp_layers: int = 0, fingerprint: str
    ) -> Self:
        """Layout of a model.

        dtype: compute dtype, which rows are gathered in, and stored in where `kv` says "auto".
        num_mtp_layers: draft layers that run; each owns window rows.
        fingerprint: identity of the checkpoint, so that equal layouts with other weights are told apart.
        """
        layers = tuple(
            _layer_layout(config, kv, dtype, layer_id) for layer_id in range(config.num_hidden_layers + num_mtp_layers)
        )
        layout_id = _layout_id(layers, config.sliding_window, fingerprint)
        return cls(layers, config.sliding_window, kv.speculation_headroom, layout_id)

    @property
    def window_ring(self) -> int:
        """Rows per sequence of the window pools: the window, the drafts after it and the token they follow."""
        return self.sliding_window + self.headroom + 1

    def state_ring(self, layer: LayerLayout) -> int:
        """Rows per sequence of a layer's state pools."""
        return layer.num_state_blocks * layer.ratio + self.headroom

    @property
    def hidden_ring(self) -> int:
        """Rows per sequence of an MTP layer's hidden pool: the last token's, and those of the drafts after it."""
        return self.headroom + 1

    @property
    def page_bytes(self) -> int:
        """Memory of one page of 256 tokens over all layers, padding included."""
        return sum(
            page_bytes(fmt, layer.entries_per_page)
            for layer in self.layers
            for fmt in (layer.compressed, layer.indexer)
            if fmt is not None
        )

    @property
    def seq_slot_bytes(self) -> int:
        """Memory of one sequence slot over all layers: window, state and hidden rings, padding included."""
        window = sum(page_bytes(layer.window, self.window_ring) for layer in self.layers)
        state = sum(
            page_bytes(fmt, self.state_ring(layer))
            for layer in self.layers
            for fmt in (layer.state, layer.indexer_state)
            if fmt is not None
        )
        hidden = sum(page_bytes(layer.hidden, self.hidden_ring) for layer in self.layers if layer.hidden is not None)
        return window + state + hidden

    @property
    def bytes_per_token(self) -> float:
        """Payload growth per token of context, padding excluded. Source: spec 6.2."""
        return sum(
            row_bytes(fmt) / layer.ratio
            for layer in self.layers
            for fmt in (layer.compressed, layer.indexer)
            if fmt is not None
        )


def row_bytes(fmt: RowFormat) -> int:
    """Payload bytes of one row."""
    return sum(section_bytes(fmt))


def _layer_layout(config: ModelConfig, kv: KVConfig, dtype: torch.dtype, layer_id: int) -> LayerLayout:
    ratio = config.compress_ratio(layer_id)
    entry = RowFormat("plain", config.head_dim, dtype=dtype)
    if kv.kv_cache_dtype == "fp8":
        entry = RowFormat("kv_fp8", config.head_dim, config.qk_rope_head_dim, dtype)
    if layer_id >= config.num_hidden_layers:
        return LayerLayout(ratio, entry, hidden=RowFormat("plain", config.hc_mult * config.hidden_size, dtype=dtype))
    if ratio == 0:
        return LayerLayout(ratio, entry)
    if ratio == 128:
        return LayerLayout(ratio, entry, entry, state=_state_format(config.head_dim))
    key = {
        "auto": RowFormat("plain", config.index_head_dim, dtype=dtype),
        "fp8": RowFormat("index_fp8", config.index_head_dim, dtype=dtype),
        "fp4": RowFormat("index_fp4", config.index_head_dim, dtype=dtype),
    }[kv.indexer_dtype]
    # The overlapping compressor has two channel sets: for its own block and for the next one.
    return LayerLayout(
        ratio, entry, entry, key, _state_format(2 * config.head_dim), _state_format(2 * config.index_head_dim)
    )


def _state_format(channels: int) -> RowFormat:
    """Value, then gate with ape added, both fp32. Source: spec 6.1."""
    return RowFormat("plain", 2 * channels, dtype=torch.float32)


def _layout_id(layers: tuple[LayerLayout, ...], sliding_window: int, fingerprint: str) -> str:
    """Hash of what gives live bytes their meaning.

    Left out on purpose, because live rows travel without them: page and ring geometry, pool sizes, and the dtype that
    quantised rows are gathered in.
    """
    payload = {
        "version": PAYLOAD_VERSION,
        "fingerprint": fingerprint,
        "sliding_window": sliding_window,
        "layers": [_payload_formats(layer) for layer in layers],
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:32]


def _payload_formats(layer: LayerLayout) -> list[list[str | int] | None]:
    formats = (layer.window, layer.compressed, layer.indexer, layer.state, layer.indexer_state, layer.hidden)
    return [[str(layer.ratio)], *(None if fmt is None else _payload_format(fmt) for fmt in formats)]


def _payload_format(fmt: RowFormat) -> list[str | int]:
    return [fmt.kind, fmt.dim, fmt.rope_dim, str(fmt.dtype) if fmt.kind == "plain" else ""]
