"""`/v1/models`, `/health`, `/ready`, and a loop that stays free."""

import threading
import time

import openai
import pytest

from tests.kit.codec import CONTEXT_LIMIT, NAMES


def test_models_lists_every_served_name(client):
    models = client.models.list().data

    assert [model.id for model in models] == list(NAMES)
    assert models[0].max_model_len == CONTEXT_LIMIT


def test_one_model_is_found_by_name_and_an_unknown_one_is_404(client):
    assert client.models.retrieve(NAMES[1]).id == NAMES[1]

    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_answers_while_the_service_is_down(http, service):
    service.is_up = False

    assert http.get("/health").status_code == 200
    ready = http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "not ready", "reasons": ["the script says so"]})


def test_ready_follows_the_service(http):
    assert http.get("/ready").json() == {"status": "ready"}


def test_the_loop_answers_while_a_long_prompt_is_encoded(http):
    body = {"model": NAMES[0], "prompt": "lorem ipsum dolor sit amet " * 9000}
    took_s: list[float] = []

    def ask_long() -> None:
        start = time.monotonic()
        assert http.post("/v1/completions", json=body).status_code == 400  # far over the context
        took_s.append(time.monotonic() - start)

    thread = threading.Thread(target=ask_long)
    thread.start()
    num_answers = 0
    while thread.is_alive():
        num_answers += http.get("/health").status_code == 200
    thread.join()

    assert num_answers >= 3, f"{num_answers} health answers in {took_s[0]:.3f} s"
