"""What Relax calls an output of a part that the CPU engine runs: between the frontend and lowering."""

from __future__ import annotations

_PREFIX = "honed.cpu_part."


def symbol(part: int, output: int) -> str:
    """The name of the function that stands for output `output` of part `part`."""
    return f"{_PREFIX}{part}.{output}"


def named(function: str) -> tuple[int, int] | None:
    """Which part and output a function stands for; None for any other."""
    if not function.startswith(_PREFIX):
        return None
    part, output = function.removeprefix(_PREFIX).split(".")
    return int(part), int(output)
