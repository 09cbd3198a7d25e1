"""Work that outlives the HTTP request that asked for it: bounded, owned by the app, cancelled with it."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack

from dsv4_cluster.errors import OverloadedError


class BackgroundRuns:
    """The background responses of one router. Belongs to one event loop."""

    def __init__(self, max_runs: int) -> None:
        self._max_runs = max_runs
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Raises: OverloadedError when as many are under way as may be."""
        if len(self._tasks) >= self._max_runs:
            raise OverloadedError(
                f"{len(self._tasks)} background responses are under way, the limit of this router; try again later"
            )

    def start(self, work: Coroutine[None, None, None], *, place: ExitStack) -> None:
        """Run `work`, which reports its own errors, to its end. place: what the request holds at the gate; it is kept
        as long, so that limits and draining count the work.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def end(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            place.close()

        task.add_done_callback(end)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
