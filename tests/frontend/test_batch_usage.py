"""What a batch says of its answers' tokens, and what files say of their end."""

import openai
import pytest

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.batch_files import MODEL, TEXT, line, results, submit, until_over
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture
def batches(tmp_path):
    """(the service, a client of a router that has batches)."""
    service = ScriptedService()
    config = RouterConfig(batches=BatchesConfig(dir=str(tmp_path)))
    with (
        serving(create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20) as client,
    ):
        yield service, client


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [(TEXT, {}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (RESPONSES, {"input": "hi"})],
)
def test_the_usage_of_a_batch_is_the_sum_of_its_answers(batches, endpoint, fields):
    service, client = batches
    service.script = lambda _: chunks_of(tokens_of("Hm.</think>Hello"), num_cached_tokens=2)
    lines = [line(f"c{i}", endpoint, **fields) for i in range(3)]

    begun = submit(client, [*lines, line("bad", endpoint, n="x")], endpoint)
    done = until_over(client, begun)

    assert (begun.usage, begun.model, done.model) == (None, None, MODEL)
    usages = [one["response"]["body"]["usage"] for one in results(client, done.output_file_id).values()]
    num_input = sum(usage.get("prompt_tokens", usage.get("input_tokens")) for usage in usages)
    num_output = 3 * len(tokens_of("Hm.</think>Hello"))
    assert num_input >= 6 and done.usage.to_dict() == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 6},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0 if endpoint == TEXT else 3 * len(tokens_of("Hm."))},
        "total_tokens": num_input + num_output,
    }


def test_files_and_results_do_not_expire_and_asking_for_it_is_refused(batches):
    _, client = batches
    week = {"anchor": "created_at", "seconds": 604800}

    with pytest.raises(openai.BadRequestError) as of_file:
        client.files.create(file=("in.jsonl", b"{}"), purpose="batch", expires_after=week)
    with pytest.raises(openai.BadRequestError) as of_batch:
        submit(client, [line("a")], output_expires_after=week)

    assert of_file.value.param == "expires_after" and of_batch.value.param == "output_expires_after"
    assert all(file.expires_at is None for file in client.files.list())
