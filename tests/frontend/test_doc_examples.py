"""Every example of docs/api.md runs in the order of the page, and those of docs/operating.md are configurations.

What is replaced: the server's address, and the pause between two looks at a batch. The model is scripted as one that
calls the tool it is offered and answers otherwise.
"""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import hash_key
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.tools.tokenizer_files import REAL_VOCAB_SIZE, write_tokenizer
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / "api.md").read_text(), re.MULTILINE | re.DOTALL)
MARK = "｜DSML｜"
MODEL_LEN = 16384  # of configs/dsv4.yaml
CALL = (
    f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="get_weather">\n<{MARK}parameter name="city" string="true">Paris'
    f"</{MARK}parameter>\n</{MARK}invoke>\n</{MARK}tool_calls>"
)


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[ScriptedService, str]]:
    """A server as the page has it, with a directory for batches."""
    write_tokenizer(tmp_path, REAL_VOCAB_SIZE)
    codec = ModelCodec.from_checkpoint(tmp_path, ServedModels.of(("deepseek-v4",)))
    service = ScriptedService()

    def script(request):
        prompt = codec.text.decode(request.prompt_token_ids)
        asks_tools = request.structured is not None and request.structured.kind.startswith("tool_call")
        thoughts = "Hm.</think>" if request.thinking else ""
        return chunks_of(tokens_of(thoughts + (CALL if asks_tools and "celsius" not in prompt else "Spring rain")))

    service.script = script
    config = RouterConfig(batches=BatchesConfig(dir=str(tmp_path / "batches")))
    with serving(create_app(service, codec, config, max_model_len=MODEL_LEN)) as url:
        yield service, url


def test_every_example_of_the_api_page_runs(server, tmp_path, monkeypatch):
    service, url = server
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        for language, text in EXAMPLES:
            text = text.replace("http://127.0.0.1:8000", url).replace("time.sleep(10)", "time.sleep(0.05)")
            if language == "bash":
                command, address, *options = shlex.split(text)
                data = options[options.index("-d") + 1]
                answer = httpx.post(address, content=data, headers={"content-type": "application/json"})
                assert command == "curl" and answer.json()["choices"][0]["message"]["content"] == "Spring rain"
            elif language == "json":
                (tmp_path / "requests.jsonl").write_text(text)
            else:
                exec(compile(text, "docs/api.md", "exec"), names)

    assert [language for language, _ in EXAMPLES].count("python") >= 6
    assert printed.getvalue().startswith("Spring rain" * 2)  # the streamed answer, and the one after the tool's result
    (line,) = [json.loads(text) for text in printed.getvalue().splitlines() if text.startswith('{"id": "batch_req')]
    assert line["custom_id"] == "q1" and line["response"]["status_code"] == 200
    assert [item.type for item in names["second"].output] == ["reasoning", "message"]
    assert len(service.requests) == 9
    for name in ("client", "claude"):
        names[name].close()


def test_the_configurations_of_the_operating_page_are_valid():
    texts = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "operating.md").read_text(), re.MULTILINE | re.DOTALL)
    configs = [yaml.safe_load(text.replace("9f86d081...", hash_key("key")))["router"] for text in texts]

    found = [RouterConfig.model_validate(config) for config in configs]

    assert [key.tenant_name for key in found[0].api.keys] == ["research"] and found[1].batches.dir is not None


def test_the_series_that_the_operating_page_names_exist(http, client, service):
    client.completions.create(model="deepseek-v4-flash", prompt="hi")
    source = "".join(path.read_text() for path in (DOCS.parent / "dsv4_cluster" / "metrics").glob("*.py"))
    named = set(re.findall(r"`(dsv4_\w+)(?:`|\{)", (DOCS / "operating.md").read_text()))

    page = http.get("/metrics").text

    assert len(named) > 15
    assert not {name for name in named if name not in page and name.removesuffix("_total") not in source}
