"""What a process is and has loaded, for people who debug a running cluster."""

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Process id and the top-level modules imported in it."""

    pid: int
    modules: frozenset[str]


def process_facts() -> ProcessFacts:
    """Facts of the calling process."""
    return ProcessFacts(pid=os.getpid(), modules=frozenset(name.partition(".")[0] for name in sys.modules))
