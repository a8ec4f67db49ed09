"""Rows that a selection (TopK) puts in order, brought to the reference's order where their scores tie.

Two right computations of nearly equal scores order their rows differently. So such outputs are compared as
sets of rows: rows of all outputs that come of one selection move together, and each has to agree with the
reference's row whose place it takes, its score among the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.runtime.compiled.model import Selection

Array = NDArray[Any]
_MOST = 1 << 24  # elements of rows that are compared with each other at once


def aligned(
    selections: Sequence[Selection],
    names: Sequence[str],
    reference: Mapping[str, Array],
    found: Mapping[str, Array],
    tolerance: Sequence[float],
) -> dict[str, Array]:
    """Return `found` with the rows of selections where the reference has them; others stay as they are.

    `names` are the outputs in order, `tolerance` as in `Probe`. A row that the reference lacks may take the
    place of one whose score ties with the last that was selected.
    """
    made = dict(found)
    for selection in selections:
        own = [names[n] for n in selection.outputs]
        if any(made[name].shape != reference[name].shape for name in own):
            continue
        known = [_rows(reference[name], axis) for name, axis in zip(own, selection.axes, strict=True)]
        given = [_rows(made[name], axis) for name, axis in zip(own, selection.axes, strict=True)]
        allowed = [
            tolerance[n] * _scale(reference[name]) for n, name in zip(selection.outputs, own, strict=True)
        ]
        score = None if selection.score is None else selection.outputs.index(selection.score)
        moved = _moved(known, given, allowed, score)
        for name, axis, value in zip(own, selection.axes, moved, strict=True):
            shape = np.moveaxis(made[name], axis, 0).shape
            made[name] = np.ascontiguousarray(np.moveaxis(value.reshape(shape), 0, axis))
    return made


def _rows(value: Array, axis: int) -> Array:
    """One row for each of the selected, with all that belongs to it."""
    moved = np.moveaxis(value, axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _scale(value: Array) -> float:
    if value.dtype.kind != "f":
        return 1.0
    return float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value))) or 1.0


def _moved(
    known: Sequence[Array], given: Sequence[Array], allowed: Sequence[float], score: int | None
) -> list[Array]:
    """The rows in the reference's order, as far as they have one."""
    everything = np.arange(known[0].shape[0])
    differing = np.flatnonzero(~_alike(known, given, allowed, everything, everything))
    size = sum(each.shape[1] for each in known)
    if not differing.size or differing.size**2 * size > _MOST:
        return list(given)
    pairs = _alike(known, given, allowed, differing[:, None], differing[None, :])
    if score is not None:  # only rows that tie may change places
        scores = given[score][differing, 0].astype(np.float64)
        pairs &= np.abs(scores[:, None] - scores[None, :]) <= 2 * allowed[score]
    taken = _matched(pairs)
    moved = [each.copy() for each in given]
    for row, column in enumerate(taken):
        for whole, each in zip(moved, given, strict=True):
            if column >= 0:
                whole[differing[row]] = each[differing[column]]
    alone = differing[[column < 0 for column in taken]]
    if alone.size and not _at_the_edge(known, given, allowed, score, alone):
        return list(given)
    for whole, each in zip(moved, known, strict=True):
        whole[alone] = each[alone]
    return moved


def _alike(
    known: Sequence[Array], given: Sequence[Array], allowed: Sequence[float], rows: Array, columns: Array
) -> Array:
    """Whether rows of the reference and rows that were found agree in all outputs."""
    alike = np.ones(np.broadcast_shapes(rows.shape, columns.shape), bool)
    for one, other, most in zip(known, given, allowed, strict=True):
        left, right = one[rows], other[columns]
        same = left == right
        if one.dtype.kind == "f":
            with np.errstate(invalid="ignore", over="ignore"):
                same |= np.isnan(left) & np.isnan(right)
                same |= np.abs(left.astype(np.float64) - right) <= most
        alike &= same.all(-1)
    return alike


def _matched(pairs: Array) -> list[int]:
    """For each row a column of its own with which it agrees, for as many as possible; -1 for the others."""
    holder = [-1] * pairs.shape[1]

    def place(row: int) -> bool:
        """Find a column along an alternating path, breadth first."""
        came: dict[int, int] = {}
        waiting = [row]
        while waiting:
            current = waiting.pop(0)
            for column in map(int, np.flatnonzero(pairs[current])):
                if column in came:
                    continue
                came[column] = current
                if holder[column] < 0:
                    while True:
                        owner = came[column]
                        before = next((c for c, held in enumerate(holder) if held == owner), -1)
                        holder[column] = owner
                        if owner == row:
                            return True
                        column = before
                waiting.append(holder[column])
        return False

    for row in range(pairs.shape[0]):
        place(row)
    taken = [-1] * pairs.shape[0]
    for column, held in enumerate(holder):
        if held >= 0:
            taken[held] = column
    return taken


def _at_the_edge(
    known: Sequence[Array], given: Sequence[Array], allowed: Sequence[float], score: int | None, rows: Array
) -> bool:
    """Whether the scores of rows tie with the last that was selected, by the reference and as found."""
    if score is None:
        return False
    last = known[score][-1].astype(np.float64)
    return all(
        bool(np.all(np.abs(each[score][rows] - last) <= 2 * allowed[score])) for each in (known, given)
    )
