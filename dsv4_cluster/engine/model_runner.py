"""Run the network on a batch and turn streams into logits, in tiles of bounded size."""

from collections.abc import Iterator

import torch

from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_cluster.model.transformer import Transformer

LOGITS_TILE_BYTES = 64 << 20  # fp32 logits held at once while prompt log-probabilities are taken


class ModelRunner:
    """The one place where the model is called. All results live on the model's device."""

    def __init__(self, model: Transformer, *, vocab_size: int) -> None:
        self._model = model
        self._tile_rows = max(1, LOGITS_TILE_BYTES // (4 * vocab_size))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the cache rows of the batch. Returns: [T, hc_mult, hidden_size], the final streams."""
        return self._model(batch)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows. rows: [R] int64. Returns: [R, V] fp32."""
        return self._model.compute_logits(streams[rows])

    def logits_tiles(self, streams: torch.Tensor, rows: list[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (slice into `rows`, logits [R', V] fp32) with at most LOGITS_TILE_BYTES of logits alive."""
        for start in range(0, len(rows), self._tile_rows):
            tile = slice(start, min(start + self._tile_rows, len(rows)))
            yield tile, self.logits(streams, torch.tensor(rows[tile], device=streams.device))
