"""How pytest-xdist shares the tests among its processes: file by file, and whole rooms that share a costly start.

A file is the unit because its module fixtures are then computed once. `@pytest.mark.xdist_group(name)` puts tests of
several files together. What takes longest starts first, so that no process is left alone with it at the end. The two
hooks take effect where a conftest.py imports them.
"""

import pytest
from xdist.scheduler import LoadGroupScheduling

# Only one local Ray cluster may exist, so all of its tests go to one process.
ROOMS = ("tests/cluster/",)
LONGEST = ("tests/cluster/", "tests/test_architecture.py")


class ByFileAndRoom(LoadGroupScheduling):
    """Work units for `--dist loadgroup`."""

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return group if group != nodeid else unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """The room or file whose tests go to one process together with this one."""
    path = nodeid.partition("::")[0]
    return next((room for room in ROOMS if path.startswith(room)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFileAndRoom | None:
    """Our units where xdist would go by groups alone."""
    return ByFileAndRoom(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)  # after the shuffling
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the longest units to the front when several processes share the tests; the order of all others stays."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
