"""Files of requests for `/v1/batches`: their lines, their way there with the public client, and their results."""

import json

from tests.kit.clock import wait_until

MODEL = "deepseek-v4-flash"
OVER = {"completed", "failed", "cancelled", "expired"}
TEXT = "/v1/completions"


def line(custom_id, url=TEXT, **fields):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 8} if url == TEXT else {"model": MODEL}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **fields}}


def upload(client, lines):
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch")


def submit(client, lines, endpoint=TEXT, **fields):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def until_over(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in OVER, limit_s=20)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    """custom id -> line; every id is there once."""
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found
