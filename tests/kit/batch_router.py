"""A router process with the scripted service and a directory of batches: `python -m tests.kit.batch_router DIR LOG`.

It prints its URL and serves until it is killed. Every prompt that it generates for is a line of LOG. The answer to a
prompt is the prompt again, after `DELAY_S`.
"""

import sys
from pathlib import Path

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

DELAY_S = 0.05
NUM_LINES_AT_ONCE = 2


def main(directory: str, log: str) -> None:
    codec, service = load_codec(), ScriptedService()

    def echo(request):
        with Path(log).open("a") as seen:
            seen.write(codec.text.decode(request.prompt_token_ids[1:]) + "\n")
        return [DELAY_S, *chunks_of(request.prompt_token_ids[1:])]

    service.script = echo
    batches = BatchesConfig(dir=directory, max_concurrent_lines=NUM_LINES_AT_ONCE)
    app = create_app(service, codec, RouterConfig(batches=batches), max_model_len=CONTEXT_LIMIT)
    with serving(app) as url:
        print(url, flush=True)
        sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    main(*sys.argv[1:])
