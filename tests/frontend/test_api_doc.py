"""docs/api.md lists every body field, each as the code treats it."""

import json
import re
from pathlib import Path

import pytest

from dsv4_cluster.frontend.batches import BATCHES
from dsv4_cluster.frontend.chat_messages import EMPTY_KEYS, MESSAGE_KEYS
from dsv4_cluster.frontend.field_table import FieldTable
from dsv4_cluster.frontend.fields import CHAT, COMPLETION
from dsv4_cluster.frontend.message_fields import COUNT_TOKENS, MESSAGES
from dsv4_cluster.frontend.response_fields import INPUT_TOKENS, RESPONSES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
TABLES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/batches": BATCHES,
}
COUNTING = {"/v1/messages/count_tokens": COUNT_TOKENS, "/v1/responses/input_tokens": INPUT_TOKENS}


def rows_of(path: str) -> dict[str, tuple[str, str]]:
    """field -> (how it is treated, meaning) of an endpoint's table."""
    section = re.split(rf"^## POST {re.escape(path)}$", TEXT, flags=re.MULTILINE)[1].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*)\|$", section, re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (treatment, meaning) for name, treatment, meaning in rows}


def neutral_values(meaning: str) -> list:
    values = re.findall(r"`([^`]*)`|\b(\d+)\b", meaning)
    return [json.loads(quoted) if quoted[:1] in ("[", "{") else quoted or int(number) for quoted, number in values]


@pytest.mark.parametrize("path", TABLES)
def test_the_table_of_an_endpoint_is_the_one_in_the_code(path):
    table: FieldTable = TABLES[path]
    rows = rows_of(path)

    for treatment, names in (("honoured", table.honoured), ("label", table.labels), ("refused", table.refused)):
        assert {name for name, (found, _) in rows.items() if found == treatment} == set(names)
    for name, values in table.refused.items():
        if values:
            assert neutral_values(rows[name][1]) == list(values), name


@pytest.mark.parametrize("path", COUNTING)
def test_the_fields_of_a_counting_endpoint_are_those_in_the_code(path):
    [sentence] = re.findall(rf"^`POST {re.escape(path)}` takes ([^{{]*?) and answers", TEXT, re.MULTILINE)

    assert set(re.findall(r"`(\w+)`", sentence)) == COUNTING[path].honoured


def test_the_keys_of_chat_messages_are_named():
    section = TEXT.partition("## POST /v1/chat/completions")[2].partition("\n## ")[0]
    text = section.partition("Messages have")[2]

    assert {key for keys in MESSAGE_KEYS.values() for key in keys} | set(EMPTY_KEYS) <= set(
        re.findall(r"`(\w+)`", text)
    )
