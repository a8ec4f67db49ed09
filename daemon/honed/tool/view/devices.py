"""The devices of a service and what they do, as `hone status`, `list` and `show` print them."""

from __future__ import annotations

from collections.abc import Sequence

from honed.protocol.device import DeviceIdentity
from honed.protocol.results import ModelPlacement
from honed.protocol.service import DeviceStatus, WorkerStatus
from honed.tool.output import Table, table


def device_text(device: DeviceIdentity | None) -> str:
    """Who a device is."""
    if device is None:
        return "none yet"
    return f"{device.name} ({device.platform}), driver {device.driver_version}"


def worker_text(worker: WorkerStatus) -> str:
    """How the worker of a device is."""
    restarts = f", restarted {worker.restarts} times" if worker.restarts else ""
    reason = f": {worker.reason}" if worker.reason else ""
    return f"{worker.state}{restarts}{reason}"


def shown(device: DeviceStatus) -> str:
    """A device's full name, or what it is called in the configuration."""
    return str(device.spec or device.name or "the best device")


def devices_table(devices: Sequence[DeviceStatus]) -> Table:
    """Each device with its worker and models; `devices` as in ServerStatus."""
    return table(
        ("device", "", "worker", ">waiting", "models"),
        map(_row, devices),
    )


def _row(device: DeviceStatus) -> tuple[str, ...]:
    waiting = str(device.queue.waiting)
    return (shown(device), _part(device), worker_text(device.worker), waiting, _models(device))


def served_by(devices: Sequence[DeviceStatus]) -> dict[str, str]:
    """The device that serves each model, by the model's name; devices as the configuration calls them."""
    return {model: each.name or shown(each) for each in devices for model in each.models}


def placement_text(placement: ModelPlacement) -> str:
    """Where a model is served, and why there."""
    why = placement.away or placement.why
    return f"{placement.served_by}{f' ({why})' if why else ''}"


def _part(device: DeviceStatus) -> str:
    if device.default:
        return "default"
    return "stands in" if device.stand_in else ""


def _models(device: DeviceStatus) -> str:
    away = [f"{name} (elsewhere until it is back)" for name in device.away]
    return ", ".join([*device.models, *away])
