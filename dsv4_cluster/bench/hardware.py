"""The machine a number was measured on. Free of torch, so that a load generator starts quickly."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a reader needs to judge a number."""

    cpu: str
    num_cpus: int
    memory_gib: float
    accelerator: str | None
    system: str
    python: str


def describe_hardware(accelerator: str | None = None) -> Hardware:
    """This machine, as the process sees it. accelerator: name of the device that computes, when it is not the CPU."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Hardware(
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(pages * page_bytes / 2**30, 1),
        accelerator=accelerator,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
