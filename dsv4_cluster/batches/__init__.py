"""Files and batches as they lie on disk, for `/v1/files` and `/v1/batches`; nothing here knows HTTP or a model."""
