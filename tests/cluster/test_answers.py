"""What comes over HTTP from the cluster is what the model says."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dsv4_cluster import SamplingParams
from tests.kit.cluster import MODEL

pytestmark = pytest.mark.ray

PROMPTS = ("a", "hello cluster", "x" * 130, "The quick brown fox. " * 30)


def test_greedy_answers_equal_the_offline_engine(cluster, offline_llm):
    expected = offline_llm.generate(list(PROMPTS), SamplingParams(max_tokens=24, temperature=0))

    answers = [cluster.complete(prompt, max_tokens=24, temperature=0).json() for prompt in PROMPTS]

    assert [a["choices"][0]["text"] for a in answers] == [e.text for e in expected]
    assert [a["choices"][0]["finish_reason"] for a in answers] == [e.finish_reason for e in expected]


def test_sampled_answers_equal_the_offline_engine_for_the_same_seed(cluster, offline_llm):
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=77)
    expected = offline_llm.generate(list(PROMPTS), params)

    answers = [
        cluster.complete(prompt, max_tokens=24, temperature=0.8, top_p=0.9, seed=77).json() for prompt in PROMPTS
    ]

    assert [a["choices"][0]["text"] for a in answers] == [e.text for e in expected]


def test_penalties_bias_and_copies_equal_the_offline_engine(cluster, offline_llm):
    fields = {
        "max_tokens": 16,
        "temperature": 0.9,
        "seed": 5,
        "n": 2,
        "top_k": 80,
        "min_p": 0.001,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "min_tokens": 4,
    }
    params = SamplingParams(**fields, logit_bias={70: 2.0, 71: -100.0}, stop_token_ids=[72])
    expected = offline_llm.generate(list(PROMPTS), params)

    fields |= {"logit_bias": {"70": 2.0, "71": -100.0}, "stop_token_ids": [72]}
    answers = [cluster.complete(prompt, **fields).json() for prompt in PROMPTS]

    assert [[c["text"] for c in a["choices"]] for a in answers] == [[o.text for o in e.outputs] for e in expected]


def test_concurrent_answers_equal_the_same_ones_alone(cluster):
    def ask(seed: int) -> str:
        answer = cluster.complete(PROMPTS[seed % len(PROMPTS)], max_tokens=20, temperature=1.0, seed=seed)
        return answer.json()["choices"][0]["text"]

    alone = [ask(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))

    assert together == alone


def test_a_streamed_chat_answer_equals_the_whole_one(cluster):
    with openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0) as client:
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 30,
            "temperature": 0,
            "extra_body": {"thinking": {"type": "disabled"}},
        }
        whole = client.chat.completions.create(**request)
        pieces = list(client.chat.completions.create(**request, stream=True))

    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == whole.choices[0].finish_reason
    assert len(pieces) > 10  # streamed, not sent in one piece


def test_models_and_health_answer(cluster):
    with httpx.Client(base_url=cluster.base_url) as client:
        models = client.get("/v1/models")
        assert models.json()["data"][0]["id"] == MODEL
        assert re.fullmatch("req-[0-9a-f]{32}", models.headers["x-request-id"])  # Serve's proxy adds none of its own
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        ({"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}, 404),
        ({"model": MODEL, "messages": []}, 400),
        ({"model": MODEL, "messages": "hello"}, 400),
        ({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, 400),
        ({"model": MODEL, "messages": [{"role": "user", "content": "x" * 40_000}]}, 400),
    ],
    ids=["not-json", "unknown-model", "no-messages", "messages-no-list", "max-tokens-no-number", "too-long"],
)
def test_bad_input_is_refused_and_the_server_goes_on(cluster, body, status):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    refused = httpx.post(
        f"{cluster.base_url}/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )

    assert refused.status_code == status
    assert set(refused.json()["error"]) >= {"message", "type", "param", "code"}
    assert cluster.complete("still here", max_tokens=2).status_code == 200
