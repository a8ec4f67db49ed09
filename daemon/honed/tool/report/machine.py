"""The machine: its devices with their peaks and drivers, and whether it is idle."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from honed.daemon.idle.signals import value_text
from honed.machine.bounds import BUSY
from honed.protocol.results import DevicePeaks
from honed.protocol.service import DeviceStatus
from honed.tool.output import bytes_text, figure_text, seconds_text
from honed.tool.view.devices import shown, worker_text

from .contents import Report
from .markup import badge, element, facts, more, name_of, table

_VERDICTS = {"quiet": "good", "busy": "warn"}


def machine(report: Report) -> Element:
    """All of it."""
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
        element("h3", name_of(identity.name if identity is not None else shown(device))),
        element("p", badge(device.worker.state, "good" if ready else "warn"), " ", role),
        facts(
            [
                ("engine", device.engine),
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
    """What it reached at most; from below where kernels have passed what was measured."""
    fp16 = peaks.fp16_gflops
    least = dict.fromkeys(peaks.raised, "at least ")
    yield "peak fp32", f"{least.get('fp32_gflops', '')}{figure_text(peaks.fp32_gflops)} GFLOP/s"
    yield (
        "peak fp16",
        f"{least.get('fp16_gflops', '')}{figure_text(fp16)} GFLOP/s" if fp16 else "none: no fp16",
    )
    yield "memory", f"{least.get('bandwidth_gbs', '')}{figure_text(peaks.bandwidth_gbs, 1)} GB/s"
    yield "a launch", f"{peaks.launch_us:.1f} us"
    if (peaks.busy or 0.0) > BUSY:
        yield "measured", "while the machine was busy: measured again when it is not"


def _caches(peaks: DevicePeaks | None) -> Element | None:
    if peaks is None or not peaks.caches_gbs:
        return None
    rows = [(bytes_text(size), f"{figure_text(speed, 1)} GB/s") for size, speed in peaks.caches_gbs]
    return more("Bandwidth by working set", table("Bandwidth by working set", ("bytes", ">speed"), rows))
