"""Formats the document of `metrics` in the OpenMetrics text format, version 1.0.

The format: https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from honed.protocol.params import Gain
from honed.protocol.service import DeviceFigures, DurationSummary, Metrics, ModelFigures
from honed.protocol.values import ENGINE_NAMES

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A line of a family: value and labels; `suffix` is appended to the family's name."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family; its name ends in its unit, if it has one."""

    kind: Literal["counter", "gauge", "summary", "histogram", "info"]
    name: str
    about: str  # The HELP text
    samples: Callable[[Metrics], Iterable[MetricSample]]
    unit: str = ""


def text(document: Metrics) -> str:
    """Return the whole exposition; families without samples keep their description."""
    return "".join(f"{line}\n" for family in FAMILIES for line in _lines(family, document)) + "# EOF\n"


def _lines(family: Family, document: Metrics) -> Iterator[str]:
    yield f"# TYPE {family.name} {family.kind}"
    if family.unit:
        yield f"# UNIT {family.name} {family.unit}"
    yield f"# HELP {family.name} {_escape(family.about)}"
    for sample in family.samples(document):
        suffix = {"counter": "_total", "info": "_info"}.get(family.kind, sample.suffix)
        pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels.items())
        yield f"{family.name}{suffix}{f'{{{pairs}}}' if pairs else ''} {_number(sample.value)}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return repr(value)


def _one(value: Callable[[Metrics], float]) -> Callable[[Metrics], list[MetricSample]]:
    return lambda document: [MetricSample(value(document))]


def _each_model(value: Callable[[ModelFigures], float]) -> Callable[[Metrics], list[MetricSample]]:
    return lambda document: [MetricSample(value(m), {"model": m.name}) for m in document.models]


def _each_device(value: Callable[[DeviceFigures], float]) -> Callable[[Metrics], list[MetricSample]]:
    return lambda document: [MetricSample(value(d), {"device": _device(d)}) for d in document.devices]


def _device(device: DeviceFigures) -> str:
    """Return a device's label: the configured name, which does not change while the service runs."""
    return device.name or "default"


def _device_ends(document: Metrics) -> Iterator[MetricSample]:
    for device in document.devices:
        for kind, count in device.worker.ends.items():
            yield MetricSample(count, {"device": _device(device), "kind": kind})


def _failures(document: Metrics) -> Iterator[MetricSample]:
    for model in document.models:
        for code, count in model.failures.items():
            yield MetricSample(count, {"model": model.name, "code": code})


def _answers(document: Metrics) -> Iterator[MetricSample]:
    for model in document.models:
        for engine, count in model.engines.items():
            yield MetricSample(count, {"model": model.name, "engine": engine})


def _summary(part: Callable[[ModelFigures], DurationSummary]) -> Callable[[Metrics], Iterator[MetricSample]]:
    def samples(document: Metrics) -> Iterator[MetricSample]:
        for model in document.models:
            spans, labels = part(model), {"model": model.name}
            for quantile, seconds in (("0.5", spans.p50), ("0.95", spans.p95), ("0.99", spans.p99)):
                if seconds is not None:
                    yield MetricSample(seconds, {**labels, "quantile": quantile})
            yield MetricSample(spans.count, labels, "_count")
            yield MetricSample(spans.sum, labels, "_sum")

    return samples


def _label_figures(
    figures: Callable[[Metrics], Mapping[str, float]], label: str
) -> Callable[[Metrics], list[MetricSample]]:
    return lambda document: [MetricSample(value, {label: name}) for name, value in figures(document).items()]


def _gain(seconds: Callable[[Gain], float]) -> Callable[[Metrics], list[MetricSample]]:
    return lambda document: [
        MetricSample(seconds(gain), {"model": model})
        for model, gain in (document.tuning.gains.items() if document.tuning else ())
    ]


def _release(document: Metrics) -> Iterator[MetricSample]:
    release = document.lease.release
    for bucket in release.buckets:
        bound = bucket.le_seconds
        yield MetricSample(bucket.count, {"le": "+Inf" if bound is None else repr(float(bound))}, "_bucket")
    yield MetricSample(release.count, {}, "_count")
    yield MetricSample(release.sum_seconds, {}, "_sum")


_counter, _gauge = partial(Family, "counter"), partial(Family, "gauge")
FAMILIES: tuple[Family, ...] = (
    Family(
        "info",
        "honed_build",
        "The version of the service",
        lambda document: [MetricSample(1, {"version": document.version})],
    ),
    _gauge(
        "honed_uptime_seconds",
        "Time since the service started",
        _one(lambda d: d.uptime_seconds),
        unit="seconds",
    ),
    _gauge("honed_connections", "Clients connected now", _one(lambda d: d.connections)),
    _gauge(
        "honed_worker_ready",
        "1 while the default device has a worker, else 0",
        _one(lambda d: int(d.worker.state == "ready")),
    ),
    _counter(
        "honed_worker_ends",
        "Ends of the default device's worker: crashed, hung, device, not started",
        _label_figures(lambda d: d.worker.ends, "kind"),
    ),
    _gauge(
        "honed_device_ready",
        "1 while the device has a worker, else 0",
        _each_device(lambda d: int(d.worker.state == "ready")),
    ),
    _gauge(
        "honed_device_waiting_requests",
        "Requests that wait for the device now",
        _each_device(lambda d: d.queue.waiting),
        unit="requests",
    ),
    _counter("honed_device_worker_ends", "Ends of the device's worker", _device_ends),
    _gauge(
        "honed_queue_requests",
        "Requests that wait for any device now",
        _one(lambda d: d.queue.waiting),
        unit="requests",
    ),
    _gauge(
        "honed_queue_longest_requests",
        "Longest queue of one device since the start",
        _one(lambda d: d.queue.longest),
        unit="requests",
    ),
    _counter(
        "honed_service_requests",
        "Inference requests, also for unknown models",
        _one(lambda d: d.whole.requests),
    ),
    _counter(
        "honed_service_failures",
        "Of these, those answered with an error",
        _label_figures(lambda d: d.whole.failures, "code"),
    ),
    _gauge("honed_model_ready", "1 while the model can run, else 0", _each_model(lambda m: int(m.ready))),
    _gauge(
        "honed_model_away",
        "1 while another device stands in, else 0",
        _each_model(lambda m: int(bool(m.away))),
    ),
    _gauge("honed_model_version", "Number of the version that serves", _each_model(lambda m: m.version)),
    _gauge(
        "honed_model_quarantined_versions",
        "Versions that faulted, were wrong or slower",
        _each_model(lambda m: m.quarantined_versions),
        unit="versions",
    ),
    _counter("honed_model_requests", "Inference requests for the model", _each_model(lambda m: m.requests)),
    _counter("honed_model_failures", "Of these, those answered with an error", _failures),
    _counter(
        "honed_model_retries",
        "Requests run again after their worker failed",
        _each_model(lambda m: m.retries),
    ),
    _counter("honed_model_batches", "Runs of several requests as one", _each_model(lambda m: m.batches)),
    _counter("honed_model_batched", "Requests run as one with others", _each_model(lambda m: m.batched)),
    _counter(
        "honed_model_answers",
        "Answered requests, by engine: "
        + ", ".join(f"{word} ({name})" for word, name in ENGINE_NAMES.items()),
        _answers,
    ),
    Family(
        "info",
        "honed_model_engine",
        "The engine that serves the model, and its device",
        lambda d: [
            MetricSample(
                1,
                {"model": m.name, "engine": m.engine, "engine_name": m.engine_name, "device": m.device},
            )
            for m in d.models
        ],
    ),
    _counter(
        "honed_model_kernel_executions",
        "Kernels executed for answered requests",
        _each_model(lambda m: m.kernel_executions),
    ),
    _counter(
        "honed_model_device_seconds",
        "Wall time of inferences, without copying inputs and outputs",
        _each_model(lambda m: m.device_seconds),
        unit="seconds",
    ),
    Family(
        "summary",
        "honed_model_latency_seconds",
        "From a request's arrival to its answer",
        _summary(lambda m: m.latency),
        unit="seconds",
    ),
    Family(
        "summary",
        "honed_model_queue_seconds",
        "Of this, the time before the request ran",
        _summary(lambda m: m.queue_time),
        unit="seconds",
    ),
    _gauge(
        "honed_model_waiting_requests",
        "Requests for the model that wait now",
        _each_model(lambda m: m.waiting),
        unit="requests",
    ),
    _gauge(
        "honed_model_spent_seconds",
        "Device time that decides what is tuned first; it decays",
        _each_model(lambda m: m.spent.seconds),
        unit="seconds",
    ),
    _counter(
        "honed_tuning_trials",
        "Candidates tried, by outcome",
        _label_figures(lambda d: d.tuning.trials if d.tuning else {}, "outcome"),
    ),
    _gauge(
        "honed_tuning_quarantined_candidates",
        "Candidates that are never run again",
        lambda document: [MetricSample(document.tuning.faults)] if document.tuning else [],
        unit="candidates",
    ),
    _gauge(
        "honed_tuning_before_seconds",
        "Estimated time of an inference before tuning",
        _gain(lambda gain: gain.before_seconds),
        unit="seconds",
    ),
    _gauge(
        "honed_tuning_now_seconds",
        "Estimated time with the best known kernels",
        _gain(lambda gain: gain.now_seconds),
        unit="seconds",
    ),
    _gauge("honed_lease_held", "1 while a tuner holds the lease", _one(lambda d: float(d.lease.held))),
    _counter(
        "honed_lease_seconds",
        "Time for which tuners held the lease",
        _one(lambda d: float(d.lease.seconds)),
        unit="seconds",
    ),
    _counter("honed_lease_grants", "Leases granted", _one(lambda d: float(d.lease.grants))),
    _counter(
        "honed_lease_revocations",
        "Leases ended by a request or a busy machine",
        _one(lambda d: float(d.lease.revoked)),
    ),
    _counter(
        "honed_lease_overdue",
        "Of these, those that the tuner left too late",
        _one(lambda d: float(d.lease.overdue)),
    ),
    Family(
        "histogram",
        "honed_lease_release_seconds",
        "From the request that ended a lease until the device was free",
        _release,
        unit="seconds",
    ),
    _counter(
        "honed_gpu_faults",
        "GPU faults in the kernel log, by process",
        _label_figures(lambda d: d.gpu_faults.counts if d.gpu_faults.watched else {}, "whose"),
    ),
    _gauge(
        "honed_temperature_celsius",
        "Temperatures that the kernel reports",
        _label_figures(lambda d: d.temperatures, "sensor"),
        unit="celsius",
    ),
)
