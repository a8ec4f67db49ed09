"""Where the time of devices went, and what tuning did."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from honed.protocol.service import Metrics
from honed.tool.commands.tasks import milliseconds, origin
from honed.tool.output import seconds_text

from .contents import Report, ReportedModel, TaskShare, task_shares
from .markup import Ids, element, facts, more, name_of, table
from .words import gain_text

_SHOWN = 15  # tasks, before those that are shown when asked for
_HUES = 6  # of models in the bar, before those that share one


def spent(models: Sequence[ReportedModel], ids: Ids) -> Element:
    """Tasks by their share of the time that all models took lately."""
    found = task_shares(models)
    if not found:
        return element("p", "No model took any time yet.", class_="empty")
    names = list(dict.fromkeys(share.model for share in found))
    names.sort(key=lambda name: -_of(found, name))
    hues = {name: min(number, _HUES) for number, name in enumerate(names)}
    profiled = {share.model for share in found if share.name is not None}
    unknown = [name for name in names if name not in profiled]
    return element(
        "div",
        _bar(found, names, hues, ids),
        _table("The longest tasks", found[:_SHOWN], found[0].share, hues),
        more(f"{len(found) - _SHOWN} more", _table("The other tasks", found[_SHOWN:], found[0].share, hues))
        if len(found) > _SHOWN
        else None,
        _unknown(unknown),
    )


def _unknown(models: Sequence[str]) -> Element | None:
    if not models:
        return None
    names = [part for name in models for part in (", ", name_of(name))][1:]
    return element(
        "p", "Of these no tasks are known, until 'hone profile M' or a tuner finds them: ", *names, "."
    )


def _of(found: Sequence[TaskShare], model: str) -> float:
    return sum(share.share for share in found if share.model == model)


def _bar(found: Sequence[TaskShare], names: Sequence[str], hues: dict[str, int], ids: Ids) -> Element:
    """All models beside each other, and which colour is whose."""
    title, text = ids.new("bar"), ids.new("bar")
    shares = [(name, _of(found, name)) for name in names]
    told = ", ".join(f"{name} {share:.1%}" for name, share in shares)
    bars, x = list[Element](), 0.0
    for name, share in shares:
        bars.append(
            element(
                "rect", element("title", f"{name}: {share:.1%}"), x=f"{100 * x:.3f}%", y=0,
                width=f"{100 * share:.3f}%", height=22, class_=f"hue{hues[name]}",
            )
        )  # fmt: skip
        x += share
    picture = element(
        "svg",
        element("title", "Time by model", id=title),
        element("desc", told, id=text),
        *bars,
        class_="bar", role="img", aria_labelledby=f"{title} {text}", width="100%", height=22,
    )  # fmt: skip
    legend = element("ul", class_="legend")
    for name, share in shares:
        legend.append(element("li", _swatch(hues[name]), name_of(name), f" {share:.1%}"))
    return element("figure", picture, legend)


def _swatch(hue: int) -> Element:
    return element(
        "svg",
        element("rect", width=10, height=10, class_=f"hue{hue}"),
        width=10, height=10, class_="swatch", aria_hidden="true",
    )  # fmt: skip


def _table(caption: str, rows: Sequence[TaskShare], longest: float, hues: dict[str, int]) -> Element:
    return table(
        caption,
        ("task", ">share", "of the longest", ">time", "model", ">launches", "schedule from"),
        [
            (
                name_of(row.name) if row.name is not None else element("em", "outside of tasks"),
                f"{row.share:.1%}",
                _share(row.share / longest, hues[row.model]),
                _time(row.seconds),
                element("span", _swatch(hues[row.model]), name_of(row.model)),
                str(row.launches or "-"),
                origin(row.schedule),
            )
            for row in rows
        ],
    )


def _share(share: float, hue: int) -> Element:
    return element(
        "svg",
        element("rect", width=f"{100 * share:.3f}%", height=8, rx=2, class_=f"hue{hue}"),
        width=90, height=8, aria_hidden="true",
    )  # fmt: skip


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds >= 60 else f"{seconds:.3g} s"


def tuning(report: Report) -> Element:
    """What came of all trials, and how tuners shared the device with requests."""
    metrics, status = report.metrics, report.status
    lease, release = metrics.lease, status.lease.release
    late = f", {lease.overdue} too late" if lease.overdue else ""
    left = (
        f"{release.count} times, after {release.p50_ms:.1f} ms (median), {release.max_ms:.1f} ms at most"
        if release.count
        else None
    )
    return element(
        "div",
        facts(
            [
                ("machine", "idle" if status.idle.idle else f"not idle: {status.idle.why}"),
                ("tuner", status.tuner.text),
                ("had the device", f"{seconds_text(lease.seconds)}, in {lease.grants} grants"),
                ("revoked", f"{lease.revoked} times{late}" if lease.grants else None),
                ("left for requests", left),
                ("trials", _trials(metrics)),
            ]
        ),
        _gains(metrics),
    )


def _trials(metrics: Metrics) -> str | None:
    figures = metrics.tuning
    if figures is None:
        return None
    if figures.reason:
        return figures.reason
    told = ", ".join(
        f"{count:,} {name}" for name, count in sorted(figures.trials.items(), key=lambda e: -e[1])
    )
    return f"{sum(figures.trials.values()):,}: {told}" if told else "none"


def _gains(metrics: Metrics) -> Element | None:
    gains = metrics.tuning.gains if metrics.tuning is not None else {}
    if not gains:
        return None
    return table(
        "What tuning expects of an inference: the sum of the best times of its tasks",
        ("model", ">when it began", ">now", ">times as fast"),
        [
            (
                name_of(model),
                milliseconds(gain.before_seconds * 1e6),
                milliseconds(gain.now_seconds * 1e6),
                gain_text(gain.before_seconds / gain.now_seconds if gain.now_seconds else None),
            )
            for model, gain in gains.items()
        ],
    )
