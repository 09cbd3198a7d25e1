"""`/tokenize` and `/detokenize` see what the generating endpoints see."""

import pytest

MODEL = "deepseek-v4-flash"


def test_text_and_ids_go_there_and_back(http):
    text = "naïve 日本 <｜User｜> \n x"
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()

    assert answer["tokens"] == [0, *bare["tokens"]]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert 128803 not in answer["tokens"]  # a spelled special token stays text
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": text}


def test_a_chat_has_the_tokens_that_are_computed_for_it(http, service):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}

    tokens = http.post("/tokenize", json=chat).json()["tokens"]
    http.post("/v1/chat/completions", json=chat)

    assert tuple(tokens) == service.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}),
        ("/tokenize", {"prompt": "a", "nonsense": 1}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": False}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": [1], "model": 5}),
    ],
)
def test_wrong_bodies_are_400(http, path, body):
    assert http.post(path, json=body).status_code == 400


def test_an_unknown_model_is_404(http):
    assert http.post("/tokenize", json={"prompt": "a", "model": "gpt-4"}).status_code == 404
