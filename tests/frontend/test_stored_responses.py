"""Responses that are kept: retrieval, deletion, input items, background generation and its cancellation."""

import time

import openai
import pytest

from dsv4_cluster.errors import WorkerLostError
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.scripted_service import HANG, says

MODEL = "deepseek-v4-flash"
OFF = {"effort": "none"}
WAIT_S = 5.0


def ask(client, **fields):
    return client.responses.create(**{"model": MODEL, "input": "hi", "reasoning": OFF, **fields})


def until(client, response_id, *states):
    """The response once it is in one of the states."""
    deadline = time.monotonic() + WAIT_S
    while (response := client.responses.retrieve(response_id)).status not in states:
        assert time.monotonic() < deadline, response.status
        time.sleep(0.01)
    return response


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_response_can_be_retrieved_as_it_was(client, service, stream):
    answer = ask(client, stream=stream, metadata={"a": "b"})
    if stream:
        answer = list(answer)[-1].response

    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()
    assert answer.store is True


def test_what_is_not_to_be_stored_is_not_found(client, service):
    answer = ask(client, store=False)

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"


def test_a_deleted_response_is_gone(client, service):
    answer = ask(client)

    client.responses.delete(answer.id)

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_input_items_are_paged_and_hold_the_history(client, service):
    first = ask(client, input="one")
    second = ask(client, input="two", previous_response_id=first.id)

    pages = client.responses.input_items.list(second.id, order="asc", limit=2)
    items = list(pages)
    latest = client.responses.input_items.list(second.id, limit=1)

    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in items] == ["one", "Hello", "two"]
    assert (pages.has_more, latest.data[0].content[0].text) == (True, "two")


def test_a_background_response_is_queued_and_then_completed(client, service):
    service.script = lambda _: [0.05, *chunks_of(tokens_of("done"))]

    queued = ask(client, background=True)

    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    done = until(client, queued.id, "completed")
    assert (done.output_text, done.id) == ("done", queued.id)
    assert ask(client, input="and?", previous_response_id=queued.id).status == "completed"


def test_a_cancelled_background_response_stops_generating(client, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]
    queued = ask(client, background=True)
    until(client, queued.id, "in_progress")

    cancelled = client.responses.cancel(queued.id)
    service.wait_until_over()

    assert (cancelled.status, service.num_aborted, service.num_ended) == ("cancelled", 1, 0)
    assert client.responses.retrieve(queued.id).status == "cancelled"
    assert client.responses.cancel(queued.id).status == "cancelled"


def test_a_deleted_background_response_stops_generating(client, service):
    service.script = lambda _: [HANG]
    queued = ask(client, background=True)
    service.wait_until_started()

    client.responses.delete(queued.id)
    service.wait_until_over()

    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_a_failed_background_response_says_why(client, service):
    service.script = lambda _: [WorkerLostError("decode worker died")]

    failed = until(client, ask(client, background=True).id, "failed")

    assert (failed.error.code, failed.error.message) == ("server_error", "decode worker died")
    with pytest.raises(openai.BadRequestError):
        ask(client, previous_response_id=failed.id)


def test_only_background_responses_can_be_cancelled(client, service):
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(ask(client).id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_response_under_way_is_no_previous_one(client, service):
    service.script = lambda _: [HANG]
    queued = ask(client, background=True)
    service.wait_until_started()
    service.script = says("Hello")

    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=queued.id)
    client.responses.cancel(queued.id)

    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("limit", ["0", "101", "01001", "0001" + "9" * 5000, "-1", "a", ""])
def test_a_page_of_input_items_is_bounded(client, http, limit):
    response = ask(client)

    answer = http.get(f"/v1/responses/{response.id}/input_items", params={"limit": limit})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"
