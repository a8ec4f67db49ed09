"""The report's text: tables in plain columns, and a summary of each family's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from .kernels import FAMILIES, Program
from .measuring import Measured
from .models import Served

Row = Sequence[str]


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"\n== {text} ==\n"


def columns(rows: Iterable[Row]) -> str:
    """Return rows as lines of aligned cells."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))] if rows else []
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def kernel_tables(programs: Sequence[Program], measured: Sequence[Measured]) -> str:
    """Return predicted and measured times side by side, family by family."""
    text = ""
    for family in FAMILIES:
        pairs = [(p, m) for p, m in zip(programs, measured, strict=True) if p.family == family]
        head = (
            "task",
            "schedule",
            "plain us",
            "packed us",
            "limiter",
            "measured",
            "shortest",
            "ratio",
            "note",
        )
        text += f"\n{family}\n" + columns([head, *(_row(p, m) for p, m in pairs)])
        text += f"{_together(pairs)}\n"
    return text


def _row(program: Program, found: Measured) -> Row:
    predicted = (f"{program.plain_us:.1f}", f"{program.packed_us:.1f}", program.limiter)
    name = (program.task, program.schedule)
    if found.us is None or found.least_us is None:
        return (*name, *predicted, "-", "-", "-", found.failed)
    wrong = found.differs is not None and found.differs > program.tolerance
    note = f"answers differ by {found.differs:.2g} of the largest value" if wrong else ""
    ratio = found.us / program.packed_us
    return (*name, *predicted, f"{found.us:.1f}", f"{found.least_us:.1f}", f"{ratio:.2f}", note)


def _together(pairs: Sequence[tuple[Program, Measured]]) -> str:
    known = [(p, m.us) for p, m in pairs if m.us]
    if len(known) < 3:
        return f"{len(known)} of {len(pairs)} measured: too few to compare"
    ratios = sorted(taken / program.packed_us for program, taken in known)
    tasks = [[(p.packed_us, us) for p, us in known if p.task == task] for task in {p.task for p, _ in known}]
    across = spearman([pair for task in tasks for pair in task])
    return (
        f"{len(known)} of {len(pairs)} measured; measured over predicted: median {median(ratios):.2f}, from "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}; rank correlation {across:.2f} in all, "
        f"{median(map(spearman, tasks)):.2f} among schedules of a task; the schedule predicted to be the "
        f"fastest takes {median(map(_regret, tasks)):.2f} times the fastest one's time"
    )


def _regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the cost of trusting the prediction: the slowest of those predicted best, over the fastest."""
    least = min(predicted for predicted, _ in pairs)
    return max(us for predicted, us in pairs if predicted == least) / min(us for _, us in pairs)


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation of pairs, ties ranked in the middle; 0 if one side is constant."""
    first, second = (_ranks([pair[n] for pair in pairs]) for n in (0, 1))
    middle = (len(pairs) - 1) / 2
    across = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = math.prod(sum((rank - middle) ** 2 for rank in ranks) for ranks in (first, second))
    return across / math.sqrt(spread) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def model_table(models: Iterable[Served]) -> str:
    """Return the table of models, one a row."""

    def figure(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = ("model", "served after s", "first ms", "trials", "then ms", "tuning says")
    rows = [
        (
            m.name,
            figure(m.added_s, 1),
            figure(m.first_ms, 2),
            figure(m.trials, 0),
            figure(m.tuned_ms, 2),
            m.text,
        )
        for m in models
    ]
    return columns([head, *rows])
