"""The real tokenizer, and the cut-down one that toy checkpoints carry."""

import pytest

from dsv4_cluster.tokenizer.encoding import ModelCodec
from tests.kit.codec import load_codec

TOY_VOCAB_SIZE = 512


@pytest.fixture(params=["real", "toy"])
def codec(request) -> ModelCodec:
    """Each of the two."""
    return load_codec() if request.param == "real" else load_codec(TOY_VOCAB_SIZE)
