"""`python -m dsv4_kernels`: the ops, their implementations, and what this machine can run."""

import sys

import torch

from dsv4_kernels.dispatch import choose, implementations, why_not


def table(device: torch.device) -> str:
    """One line per op: implementations, the one that bf16 tensors on `device` get, and what the others lack."""
    rows = [("op", "implementations", f"bf16 on {device.type}", "cannot run here")]
    for op, names in sorted(implementations().items()):
        lacking = [f"{name} {reason}" for name in names if (reason := why_not(name, device))]
        rows.append((op, ", ".join(names), choose(op, device, torch.bfloat16), "; ".join(lacking) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(table(here) + "\n")
