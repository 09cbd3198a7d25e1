"""The small tokenizer has exactly the model's ids, all V4 marks, and works with the official prompt encoder."""

import json

import pytest
from deepseek_recipe import AssistantMessage, Conversation, DeepseekV4Encoding, SystemMessage, Tokenizer, UserMessage
from tokenizers import Tokenizer as RawTokenizer

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools.tokenizer_files import write_tokenizer

MARKS = (
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>"),
    *(
        "<｜fim▁hole｜>",
        "<｜fim▁begin｜>",
        "<｜fim▁end｜>",
        "<｜query｜>",
        "<｜authority｜>",
        "<｜domain｜>",
        "<｜title｜>",
    ),
    *("<｜read_url｜>", "<｜image｜>"),
)
TEXTS = ("Hello world", "naïve café", "中文字符", "🦀 emoji 👩‍👩‍👧", "tab\tand\r\nlines\n\n", "123456", "", "\x00\x7f")


@pytest.fixture(scope="module")
def raw(toy_dir) -> RawTokenizer:
    return RawTokenizer.from_file(str(toy_dir / "tokenizer.json"))


def test_every_id_of_the_model_has_one_token(raw):
    tokens = [raw.id_to_token(token_id) for token_id in range(512)]

    assert None not in tokens and len(set(tokens)) == 512
    assert raw.get_vocab_size() == 512


def test_control_tokens_keep_their_ids_and_marks_are_single_tokens(raw):
    assert [raw.id_to_token(i) for i in range(3)] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    for mark in MARKS:
        assert raw.encode(mark, add_special_tokens=False).ids == [raw.token_to_id(mark)], mark


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(raw, text):
    ids = raw.encode(text, add_special_tokens=False).ids

    assert raw.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(raw):
    text = "".join(map(chr, range(0x20, 0x2000, 7)))

    assert raw.decode(raw.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("thinking", [True, False])
def test_official_encoder_renders_and_encodes_a_conversation(toy_dir, raw, thinking):
    encoding = DeepseekV4Encoding().with_tokenizer(Tokenizer.from_file(str(toy_dir / "tokenizer.json")))
    conversation = Conversation(
        [SystemMessage("Be brief."), UserMessage("Größe <think>?"), AssistantMessage("42"), UserMessage("Why 中?")],
        thinking_mode=thinking,
    )

    ids = encoding.encode(conversation)

    opening = "<think>" if thinking else "</think>"
    assert ids[0] == 0 and ids.count(0) == 1
    assert ids[-2:] == [raw.token_to_id("<｜Assistant｜>"), raw.token_to_id(opening)]
    assert max(ids) < 512
    assert raw.decode(ids, skip_special_tokens=False).endswith(f"<｜User｜>Why 中?<｜Assistant｜>{opening}")
    assert ids.count(raw.token_to_id("<think>")) == int(thinking), "a mark in user text is plain text"


def test_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size 300 is too small"):
        write_tokenizer(tmp_path, 300)


def test_real_vocabulary_gets_the_published_file(tmp_path):
    write_tokenizer(tmp_path, 129280)

    tokenizer = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.token_to_id("｜DSML｜") == 128825
    assert tokenizer.get_vocab_size() == 129280
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"]["content"].startswith("<｜begin")
