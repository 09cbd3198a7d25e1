"""Tasks that outlive the request which started them.

Serve and Ray remember, in context variables, which calls a request has made, and cancel all of them when the request is
cancelled. A call that has to go on regardless (a subscription that others share, an abort because of that very
cancellation) must therefore start outside the request's context.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class DetachedTasks:
    """Owner of such tasks: keeps them alive, and cancels what is left at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `work` in an empty context. Returns: the task; whoever awaits it should shield it."""
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel every task that has not ended."""
        for task in self._tasks:
            task.cancel()
