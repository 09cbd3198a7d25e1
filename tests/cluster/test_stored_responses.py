"""Responses are found again whichever router a request reaches, and cancelled by any of them."""

import openai
import pytest

from tests.kit.clock import WAIT_LIMIT_S, wait_until
from tests.kit.cluster import MODEL, LocalCluster

pytestmark = pytest.mark.ray

NUM_TRIES = 8  # requests on connections of their own, which two routers share


def each_on_its_own(cluster: LocalCluster, call) -> list:
    """What `call` returns on several connections."""
    found = []
    for _ in range(NUM_TRIES):
        with openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="x", max_retries=0, timeout=WAIT_LIMIT_S) as api:
            found.append(call(api))
    return found


def ask(api: openai.OpenAI, **fields):
    return api.responses.create(
        **{"model": MODEL, "input": "hi", "max_output_tokens": 4, "reasoning": {"effort": "none"}, **fields}
    )


def test_every_router_finds_an_earlier_response(cluster):
    [first, *_] = each_on_its_own(cluster, ask)

    found = each_on_its_own(cluster, lambda api: api.responses.retrieve(first.id))
    continued = each_on_its_own(cluster, lambda api: ask(api, previous_response_id=first.id))

    assert {response.output_text for response in found} == {first.output_text}
    assert {response.previous_response_id for response in continued} == {first.id}


def test_any_router_cancels_a_background_response(cluster):
    def start(api: openai.OpenAI):
        return ask(api, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})

    queued = each_on_its_own(cluster, start)
    wait_until(lambda: cluster.num_running() == NUM_TRIES)
    ids = iter([response.id for response in queued])

    cancelled = each_on_its_own(cluster, lambda api: api.responses.cancel(next(ids)))

    assert {response.status for response in cancelled} == {"cancelled"}
    wait_until(cluster.is_idle, limit_s=5.0)
