"""A batch on a live cluster: any router takes the file, one of them runs it, any router tells of it."""

import json

import openai
import pytest

from tests.kit.clock import WAIT_LIMIT_S, wait_until
from tests.kit.cluster import MODEL

pytestmark = pytest.mark.ray

NUM_LINES = 5


def test_a_batch_has_the_answers_that_its_requests_have_alone(cluster):
    bodies = [{"prompt": f"line {i}", "max_tokens": 4, "temperature": 0} for i in range(NUM_LINES)]
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, **body}})
        for i, body in enumerate(bodies)
    ]

    def ask(call):
        """On a connection of its own, which leads to either router."""
        with openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="x", max_retries=0, timeout=WAIT_LIMIT_S) as api:
            return call(api)

    file = ask(lambda api: api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch"))
    batch = ask(
        lambda api: api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    )
    wait_until(lambda: ask(lambda api: api.batches.retrieve(batch.id)).status == "completed")
    output_id = ask(lambda api: api.batches.retrieve(batch.id)).output_file_id
    output = map(json.loads, ask(lambda api: api.files.content(output_id)).text.splitlines())

    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in output}
    alone = {f"c{i}": cluster.complete(**body).json()["choices"][0]["text"] for i, body in enumerate(bodies)}
    assert texts == alone
