"""Run the network on a batch and turn streams into logits, in tiles of bounded size."""

from collections.abc import Iterator

import torch

from dsv4_cluster.engine.single_rows import single_rows
from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_cluster.model.transformer import Transformer

LOGITS_TILE_BYTES = 64 << 20  # fp32 logits held at once while prompt log-probabilities are taken


class ModelRunner:
    """The one place where the model is called. All results live on the model's device."""

    def __init__(self, model: Transformer, *, vocab_size: int, is_row_by_row: bool = False) -> None:
        """is_row_by_row: one row per pass, which makes its bits independent of the others (`engine/single_rows.py`)."""
        self._model = model
        self._is_row_by_row = is_row_by_row
        self._tile_rows = max(1, LOGITS_TILE_BYTES // (4 * vocab_size))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the cache rows of the batch. Returns: [T, hc_mult, hidden_size], the final streams."""
        if self._is_row_by_row:
            return torch.cat([self._model(row) for row in single_rows(batch)])
        return self._model(batch)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows. rows: [R] int64. Returns: [R, V] fp32."""
        wanted = streams[rows]
        if self._is_row_by_row and len(wanted) > 1:
            return torch.cat([self._model.compute_logits(row) for row in wanted.split(1)])
        return self._model.compute_logits(wanted)

    def logits_tiles(self, streams: torch.Tensor, rows: list[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (slice into `rows`, logits [R', V] fp32) with at most LOGITS_TILE_BYTES of logits alive."""
        for start in range(0, len(rows), self._tile_rows):
            tile = slice(start, min(start + self._tile_rows, len(rows)))
            yield tile, self.logits(streams, torch.tensor(rows[tile], device=streams.device))
