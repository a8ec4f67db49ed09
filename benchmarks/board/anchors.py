"""Reads what others' programs reach on an RK3588 today: the bar for what honed measures and predicts."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.protocol import strict

from .models import Served
from .report import columns, heading

_FILE = Path(__file__).with_name("anchors.toml")
SQUEEZENET, LIGHTGLUE = "SqueezeNet 1.1", "LightGlue-192"
_SERVED = {"squeezenet": SQUEEZENET, "lightglue": LIGHTGLUE}  # The report's models that others measured, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure. `source` is a key of the file's sources."""

    value: float
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The figures that others publish of a model: on four A76, on a Mali-G610 and on one core of the NPU."""

    model: str
    unit: str = "ms"
    cpu: tuple[Figure, ...] = ()
    gpu: tuple[Figure, ...] = ()
    npu: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """The content of the file."""

    sources: dict[str, str]
    anchor: tuple[Anchor, ...]

    def gpu_ms(self, model: str) -> float:
        """Return the best time that others have for `model` on the GPU."""
        return min(one.value for each in self.anchor if each.model == model for one in each.gpu)


@functools.cache
def load() -> Anchors:
    """Return the figures that come with this file."""
    return strict.from_plain(Anchors, tomllib.loads(_FILE.read_text()), where="anchors.toml")


def table(own: Mapping[str, float], called: str) -> str:
    """Return the figures as text, beside honed's `own` in ms by model, whose column is `called` so."""
    known = load()
    head = ("model, ms", "CPU, 4 x A76", "GPU", "NPU", called)
    rows = [
        (
            each.model if each.unit == "ms" else f"{each.model}, {each.unit}",
            *(_cell(figures) for figures in (each.cpu, each.gpu, each.npu)),
            f"{own[each.model]:.2f}" if each.model in own else "-",
        )
        for each in known.anchor
    ]
    sources = "".join(f"{key}: {text}\n" for key, text in known.sources.items())
    return heading("What a user of an RK3588 gets today") + columns([head, *rows]) + f"\n{sources}"


def beside(models: Iterable[Served]) -> str:
    """Return the figures as text, beside the least time of each of a report's models."""
    times = ((_SERVED[m.name], m.first_ms, m.tuned_ms) for m in models if m.name in _SERVED)
    own = {name: min(ms for ms in found if ms is not None) for name, *found in times if any(found)}
    return table(own, "honed here")


def _cell(figures: tuple[Figure, ...]) -> str:
    return "; ".join(f"{one.value:g} ({', '.join(filter(None, (one.note, one.source)))})" for one in figures)
