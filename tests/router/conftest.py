"""An orchestrator over scripted replicas."""

from collections.abc import Callable

import pytest

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.router.orchestrator import Orchestrator
from tests.kit.scripted_replicas import ScriptedDecode, ScriptedPrefill

MakeOrchestrator = Callable[..., Orchestrator]


@pytest.fixture
def make_orchestrator() -> MakeOrchestrator:
    """make_orchestrator(prefill, decode, **router settings)."""

    async def is_up() -> list[str]:
        return []

    def make(prefill: ScriptedPrefill, decode: ScriptedDecode, probe=is_up, **settings) -> Orchestrator:
        config = RouterConfig(**settings)
        return Orchestrator(prefill, decode, config, model_names=("m",), max_model_len=100, probe=probe)

    return make
