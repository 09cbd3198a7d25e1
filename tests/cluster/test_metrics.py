"""`/metrics` of a live cluster: all routers and all replicas on one page, whichever router answers."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.clock import wait_until

pytestmark = pytest.mark.ray


def test_one_page_has_every_router_and_replica_and_adds_up(cluster):
    def generated() -> tuple[float, set[str], dict[str, float]]:
        families = {
            f.name: f for f in text_string_to_metric_families(httpx.get(f"{cluster.base_url}/metrics", timeout=30).text)
        }
        samples = families["dsv4_generated_tokens"].samples
        pages = {s.labels["role"]: s.value for s in families["dsv4_kv_pages"].samples}
        return sum(s.value for s in samples), {s.labels["router"] for s in samples}, pages

    scrapes = []

    def is_whole() -> bool:
        """A router or replica that does not answer a scrape in time is missing on that page only."""
        scrapes.append(generated())
        _, routers, pages = scrapes[-1]
        return len(routers) == 2 and pages == {"prefill": 32, "decode": 32}

    wait_until(is_whole)
    before = scrapes[-1][0]
    answers = [cluster.complete(f"count {i}", max_tokens=5, ignore_eos=True) for i in range(6)]
    num_tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)

    assert num_tokens == 30
    wait_until(lambda: generated()[0] - before == num_tokens)
