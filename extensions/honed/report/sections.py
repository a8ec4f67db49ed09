"""Draws sections of the page: the machine, the time of devices by task, tuning, and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from honed.daemon.idle.signals import value_text
from honed.daemon.observe.faults import OTHER, WHOSE, AttributedFault
from honed.jobs.events import Quarantined
from honed.machine.profile import measured_while_busy
from honed.protocol.service import DeviceStatus, Metrics
from honed.protocol.values import DevicePeaks, engine_name
from honed.tool.commands.faults import REACH
from honed.tool.commands.tasks import milliseconds, origin
from honed.tool.output import bytes_text, capital, figure_text, seconds_text
from honed.tool.view.tables import device_name, worker_text

from .contents import Report, ReportedModel, TaskShare, task_shares
from .markup import Cell, Ids, badge, day, element, facts, gain_text, moment, more, name_of, table

_VERDICTS = {"quiet": "good", "busy": "warn"}
_TASKS_SHOWN = 15  # Tasks before those that open on a click
_HUES = 6  # Colours of models in the bar, before the one that the others share
_SHOWN = 10  # Candidates, or faults, before those that open on a click


def machine_section(report: Report) -> Element:
    """Return the section on the machine, its devices, and its idleness."""
    status, places = report.status, report.status.places
    heat = sorted(report.metrics.temperatures.items(), key=lambda each: -each[1])
    return element(
        "div",
        facts(
            [
                ("host", f"{report.host}, {report.system}"),
                ("service", f"{status.name} {status.version}, process {status.pid}, "
                            f"up {seconds_text(status.uptime_seconds)}"),
                ("socket", name_of(places.socket)),
                ("models in", name_of(places.state_dir)),
                ("connections", str(status.connections)),
                ("requests", f"{status.queue.waiting} waiting, {status.queue.running} running"),
                ("hottest", ", ".join(f"{name} {celsius:.0f} °C" for name, celsius in heat[:3])),
                *(("being added", f"{job.model_name}: {job.fraction:.0%} {job.text or job.stage}")
                  for job in status.jobs),
                *(("damaged", name) for name in status.damaged),
            ]
        ),
        element("div", *(_device(each) for each in status.devices), class_="devices"),
        element("h3", "Idleness"),
        element("p", badge("idle", "good") if status.idle.idle else badge("not idle", "warn"),
                "" if status.idle.idle else f" {status.idle.why}"),
        table(
            "Signals: one that is busy keeps the device from tuners",
            ("signal", ">value", "verdict", "~what it is"),
            [
                (each.signal, value_text(each.value, each.unit),
                 badge(each.verdict, _VERDICTS.get(each.verdict, "")), each.text)
                for each in status.idle.readings
            ],
        ),
    )  # fmt: skip


def _device(device: DeviceStatus) -> Element:
    identity = device.device
    role = "the default" if device.default else "stands in for others" if device.stand_in else ""
    ready = device.worker.state == "ready"
    return element(
        "section",
        element("h3", name_of(identity.name if identity is not None else device_name(device))),
        element("p", badge(device.worker.state, "good" if ready else "warn"), " ", role),
        facts(
            [
                ("engine", engine_name(device.engine)),
                ("platform", identity.platform if identity is not None else None),
                ("vendor", identity.vendor if identity is not None else None),
                ("driver", identity.driver_version if identity is not None else None),
                ("kernel driver", identity.kernel_driver if identity is not None else None),
                ("worker", worker_text(device.worker)),
                ("models", ", ".join(device.models)),
                ("elsewhere until it is back", ", ".join(device.away)),
                *(_peaks(device.peaks) if device.peaks is not None else ()),
            ]
        ),
        _caches(device.peaks),
        class_="card",
    )


def _peaks(peaks: DevicePeaks) -> Iterator[tuple[str, str | None]]:
    """Yield the peaks of a device; those that kernels have exceeded are lower bounds."""
    fp16 = peaks.fp16_gflops
    least = dict.fromkeys(peaks.raised, "at least ")
    yield "peak fp32", f"{least.get('fp32_gflops', '')}{figure_text(peaks.fp32_gflops)} GFLOP/s"
    yield (
        "peak fp16",
        f"{least.get('fp16_gflops', '')}{figure_text(fp16)} GFLOP/s" if fp16 else "none: no fp16",
    )
    yield "memory", f"{least.get('bandwidth_gbs', '')}{figure_text(peaks.bandwidth_gbs, 1)} GB/s"
    yield "a launch", f"{peaks.launch_us:.1f} us"
    if measured_while_busy(peaks):
        yield "measured", "while the machine was busy: measured again when it is not"


def _caches(peaks: DevicePeaks | None) -> Element | None:
    if peaks is None or not peaks.caches_gbs:
        return None
    rows = [(bytes_text(size), f"{figure_text(speed, 1)} GB/s") for size, speed in peaks.caches_gbs]
    return more("Bandwidth by working set", table("Bandwidth by working set", ("bytes", ">speed"), rows))


def time_section(models: Sequence[ReportedModel], ids: Ids) -> Element:
    """Return the section on tasks by their share of the recent time of all models."""
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
        _table("The longest tasks", found[:_TASKS_SHOWN], found[0].share, hues),
        more(
            f"{len(found) - _TASKS_SHOWN} more",
            _table("The other tasks", found[_TASKS_SHOWN:], found[0].share, hues),
        )
        if len(found) > _TASKS_SHOWN
        else None,
        _models_without_tasks(unknown),
    )


def _models_without_tasks(models: Sequence[str]) -> Element | None:
    if not models:
        return None
    names = [part for name in models for part in (", ", name_of(name))][1:]
    return element(
        "p", "Of these no tasks are known, until 'hone profile M' or a tuner finds them: ", *names, "."
    )


def _of(task_shares: Sequence[TaskShare], model: str) -> float:
    return sum(share.share for share in task_shares if share.model == model)


def _bar(task_shares: Sequence[TaskShare], names: Sequence[str], hues: dict[str, int], ids: Ids) -> Element:
    title, text = ids.new("bar"), ids.new("bar")
    shares = [(name, _of(task_shares, name)) for name in names]
    described = ", ".join(f"{name} {share:.1%}" for name, share in shares)
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
        element("desc", described, id=text),
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
                seconds_text(row.seconds) if row.seconds >= 60 else f"{row.seconds:.3g} s",
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


def tuning_section(report: Report) -> Element:
    """Return the section on tuning: all trials, and how tuners shared the device with requests."""
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
    text = ", ".join(
        f"{count:,} {name}" for name, count in sorted(figures.trials.items(), key=lambda e: -e[1])
    )
    return f"{sum(figures.trials.values()):,}: {text}" if text else "none"


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


def faults_section(report: Report) -> Element:
    """Return the section on faults; it also says if nothing went wrong, or if that is not known."""
    return element(
        "div",
        element("h3", "Worker processes"),
        _ends(report),
        element("h3", "Versions in quarantine"),
        _versions(report),
        element("h3", "Candidates in quarantine"),
        *_candidates(report.faults.quarantined),
        element("h3", "Kernel log"),
        *_log(report),
    )


def faults_count(report: Report) -> int:
    """Return the number of faults to look at, without those of other programs."""
    ends = sum(sum(device.worker.ends.values()) for device in report.metrics.devices)
    ours = sum(fault.whose != OTHER for fault in report.faults.log)
    return ends + ours + len(report.faults.quarantined or ())


def _nothing(text: str) -> Element:
    return element("p", text, class_="empty")


def _ends(report: Report) -> Element:
    rows: list[tuple[Cell, ...]] = [
        (moment(end.time), device.shown, badge(end.kind, "bad"), end.reason)
        for device in report.metrics.devices
        for end in device.worker.last_ends
    ]
    if not rows:
        return _nothing("None ended by itself since the service started.")
    return table("The last that the service did not end", ("when", "device", "how", "~why"), rows)


def _versions(report: Report) -> Element:
    rows = [
        (name_of(model.listed.name), str(version.number), moment(version.made), version.quarantine)
        for model in report.models
        for version in model.history.versions
        if version.quarantine
    ]
    if not rows:
        return _nothing("None: no version that tuning published did wrong.")
    return table("Versions that are not served again", ("model", ">version", "made", "~why"), rows)


def _candidates(quarantined: Sequence[Quarantined] | None) -> list[Element]:
    if quarantined is None:
        return [_nothing("Not told; the notes say why.")]
    if not quarantined:
        return [_nothing("None: no candidate faulted, hung, or took the machine down.")]
    made = [_candidate_table(quarantined[:_SHOWN])]
    if len(quarantined) > _SHOWN:
        made.append(more(f"{len(quarantined) - _SHOWN} more", _candidate_table(quarantined[_SHOWN:])))
    return made


def _candidate_table(quarantined: Sequence[Quarantined]) -> Element:
    return table(
        "Candidates that are never run again on this device",
        ("task", "when", "outcome", "~what happened"),
        [
            (
                name_of(each.name or each.task),
                moment(each.time),
                badge(each.outcome or "no verdict", "warn"),
                element("span", each.reason, _story(each)),
            )
            for each in quarantined
        ],
    )


def _story(each: Quarantined) -> Element | None:
    if not each.story or each.story == each.reason:
        return None
    return more("what the kernel log says", element("pre", each.story))


def _log(report: Report) -> list[Element]:
    faults = report.faults
    if faults.log_reason:
        return [_nothing(f"{capital(faults.log_reason)}.")]
    if not faults.log:
        return [_nothing("It holds no fault of a GPU since the machine started.")]
    latest = [_fault(fault) for fault in reversed(faults.log)]
    rest = latest[_SHOWN:]
    return [*latest[:_SHOWN], *([more(f"{len(rest)} earlier ones", *rest)] if rest else [])]


def _fault(fault: AttributedFault) -> Element:
    by = f" {fault.device}" if fault.device else ""
    by += f", process {fault.process}" if fault.process is not None else ""
    by += f" ({fault.command})" if fault.command else ""
    return element(
        "div",
        element(
            "p", badge(REACH.get(fault.severity, fault.severity), "bad"), element("strong", fault.meaning)
        ),
        element("p", f"{day(fault.time)}, {fault.driver}{by}: {WHOSE[fault.whose]}"),
        more("records", element("pre", "\n".join(fault.records))),
        class_="fault",
    )
