"""Drafts, constraints and both of them over each real transport: the cluster answers what plain offline decoding does.

The applications of this file run beside the session's, on the same Ray.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from ray import serve

from dsv4_cluster import SamplingParams
from dsv4_cluster.offline import RequestOutput
from dsv4_cluster.serve.runner import deploy
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels
from tests.kit.cluster import APP, MODEL, LocalCluster, serve_config

pytestmark = pytest.mark.ray

PROMPTS = ("hello cluster", "x" * 130, "The quick brown fox. " * 30)
CASES = ((5, 0.0), (0, 1.0), (0, 2.0), (1, 2.0))  # (seed, temperature) of constrained answers
NUM_DRAFT_TOKENS = 3
MAX_STAGED_BYTES = 1 << 20
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"type": "string", "enum": ["red", "green"]},
    },
    "required": ["n", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Served:
    """One application: where it answers and how to look inside."""

    name: str
    url: str

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=60)

    def num_drafted(self) -> int:
        audits = serve.get_deployment_handle("Decode", self.name).broadcast("audit").results(timeout_s=20)
        return sum(audit.stats.total_drafted_tokens for ranks in audits for audit in ranks)


def deploy_beside(cluster: LocalCluster, tmp_path: Path, transports: tuple[str, ...]) -> None:
    """Deploy the session's application, which stays as it is, and one that drafts for each transport."""
    raw = serve_config(Path(cluster.config.model.path), cluster.port)
    (first,) = raw["applications"]
    for transport in transports:
        args = first["args"] | {
            "transfer": {"backend": transport, "max_staged_bytes": MAX_STAGED_BYTES},
            "speculation": {"num_draft_tokens": NUM_DRAFT_TOKENS},
            "router": first["args"]["router"] | {"num_replicas": 1},
        }
        raw["applications"].append({**first, "name": transport, "route_prefix": f"/{transport}", "args": args})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert deploy(path, raw, cluster.config, threading.Event())


@pytest.fixture(scope="module")
def applications(_running_cluster, tmp_path_factory) -> Iterator[dict[str, Served]]:
    """By name: the session's, which drafts nothing, and one with drafts per transport."""
    tmp_path, url = tmp_path_factory.mktemp("beside"), _running_cluster.base_url
    deploy_beside(_running_cluster, tmp_path, ("shm", "grpc"))
    yield {"plain": Served(APP, url), **{name: Served(name, f"{url}/{name}") for name in ("shm", "grpc")}}
    deploy_beside(_running_cluster, tmp_path, ())


@pytest.fixture(scope="module")
def codec(toy_dir) -> ModelCodec:
    return ModelCodec.from_checkpoint(toy_dir, ServedModels.of([MODEL]))


@pytest.fixture(scope="module")
def constrained(offline_llm, codec) -> tuple[list[dict], list[RequestOutput]]:
    """Chat bodies, and what the offline engine answers."""
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"number {seed}"}],
            "thinking": {"type": "disabled"},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "max_tokens": 110,
            "temperature": temperature,
            "seed": seed,
        }
        for seed, temperature in CASES
    ]
    prompts = [codec.chat.encode(body, context_limit=4096) for body in bodies]
    expected = offline_llm.generate(
        prompt_token_ids=[prompt.token_ids for prompt in prompts],
        sampling_params=[
            SamplingParams(
                max_tokens=110, temperature=temperature, top_p=prompt.top_p, seed=seed, structured=prompt.structured
            )
            for (seed, temperature), prompt in zip(CASES, prompts, strict=True)
        ],
    )
    return bodies, expected


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_answers_with_drafts_equal_plain_offline_ones(applications, offline_llm, transport):
    application, before = applications[transport], applications[transport].num_drafted()
    fields = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 77}]
    cases = [{"max_tokens": 24, "logprobs": 0, **one} for one in fields for _ in PROMPTS]
    expected = offline_llm.generate([*PROMPTS, *PROMPTS], [SamplingParams(**case) for case in cases])

    answers = [
        application.post("/v1/completions", {"prompt": prompt, **case}).json()
        for prompt, case in zip([*PROMPTS, *PROMPTS], cases, strict=True)
    ]

    for answer, one in zip(answers, expected, strict=True):
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (one.text, one.finish_reason)
        own = [entry[token_id] for entry, token_id in zip(one.logprobs, one.token_ids, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            own[: answer["usage"]["completion_tokens"]], abs=1e-4
        )
    assert application.num_drafted() > before


@pytest.mark.parametrize("name", ["plain", "shm", "grpc"])
def test_constrained_answers_equal_offline_ones(applications, constrained, name):
    bodies, expected = constrained

    answers = [applications[name].post("/v1/chat/completions", body).json() for body in bodies]

    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents == [one.text for one in expected]
    finished = [text for text, one in zip(contents, expected, strict=True) if one.finish_reason == "stop"]
    assert len(finished) >= 2 and all(json.loads(text)["kind"] in ("red", "green") for text in finished)
    assert (applications[name].num_drafted() > 0) == (name != "plain")


def test_a_prompt_whose_cache_can_never_be_handed_over_is_refused_for_good(applications):
    answer = applications["grpc"].post("/v1/completions", {"prompt": [20] * 6000, "max_tokens": 2})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "6000 tokens" in error["message"] and f"max_staged_bytes is {MAX_STAGED_BYTES}" in error["message"]
    assert applications["grpc"].post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
