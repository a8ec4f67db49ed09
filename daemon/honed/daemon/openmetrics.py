"""The document of `metrics` in the OpenMetrics text format, version 1.0.

The format: https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Document = Mapping[str, Any]
_QUANTILES = (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: its value and labels; `suffix` is what its name has beyond the family's."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name ends in its unit where it has one."""

    name: str
    kind: Literal["counter", "gauge", "summary", "histogram", "info"]
    unit: str
    about: str  # its HELP
    samples: Callable[[Document], Iterable[Sample]]


def text(document: Document) -> str:
    """The whole exposition; families without samples keep their description."""
    return "".join(f"{line}\n" for family in FAMILIES for line in _lines(family, document)) + "# EOF\n"


def _lines(family: Family, document: Document) -> Iterator[str]:
    yield f"# TYPE {family.name} {family.kind}"
    if family.unit:
        yield f"# UNIT {family.name} {family.unit}"
    yield f"# HELP {family.name} {_escaped(family.about)}"
    for sample in family.samples(document):
        suffix = {"counter": "_total", "info": "_info"}.get(family.kind, sample.suffix)
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
        yield f"{family.name}{suffix}{f'{{{pairs}}}' if pairs else ''} {_number(sample.value)}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return repr(value)


def _one(value: Callable[[Document], float]) -> Callable[[Document], list[Sample]]:
    return lambda document: [Sample(value(document))]


def _each_model(value: Callable[[Document], float]) -> Callable[[Document], list[Sample]]:
    return lambda document: [Sample(value(m), {"model": m["name"]}) for m in document["models"]]


def _each_device(value: Callable[[Document], float]) -> Callable[[Document], list[Sample]]:
    return lambda document: [Sample(value(d), {"device": _device(d)}) for d in document["devices"]]


def _device(device: Mapping[str, Any]) -> str:
    """Its label: the configured name, which does not change while the service runs."""
    return str(device["name"] or "default")


def _device_ends(document: Document) -> Iterator[Sample]:
    for device in document["devices"]:
        for kind, count in device["worker"]["ends"].items():
            yield Sample(count, {"device": _device(device), "kind": kind})


def _failures(document: Document) -> Iterator[Sample]:
    for model in document["models"]:
        for code, count in model["failures"].items():
            yield Sample(count, {"model": model["name"], "code": code})


def _answers(document: Document) -> Iterator[Sample]:
    for model in document["models"]:
        for engine, count in model["engines"].items():
            yield Sample(count, {"model": model["name"], "engine": engine})


def _summary(part: str) -> Callable[[Document], Iterator[Sample]]:
    def samples(document: Document) -> Iterator[Sample]:
        for model in document["models"]:
            figures, labels = model[part], {"model": model["name"]}
            for quantile, key in _QUANTILES:
                if figures[key] is not None:
                    yield Sample(figures[key], {**labels, "quantile": quantile})
            yield Sample(figures["count"], labels, "_count")
            yield Sample(figures["sum"], labels, "_sum")

    return samples


def _labelled(figures: Callable[[Document], Mapping[str, float]], label: str) -> Any:
    return lambda document: [Sample(value, {label: name}) for name, value in figures(document).items()]


def _tuning(part: str) -> Callable[[Document], Mapping[str, Any]]:
    return lambda document: (document["tuning"] or {}).get(part, {})


def _gain(key: str) -> Callable[[Document], list[Sample]]:
    return lambda document: [
        Sample(gain[key], {"model": model}) for model, gain in _tuning("gains")(document).items()
    ]


def _lease(key: str) -> Callable[[Document], list[Sample]]:
    return _one(lambda document: float(document["lease"][key]))


def _release(document: Document) -> Iterator[Sample]:
    release = document["lease"]["release"]
    for bucket in release["buckets"]:
        bound = bucket["le_seconds"]
        yield Sample(bucket["count"], {"le": "+Inf" if bound is None else repr(float(bound))}, "_bucket")
    yield Sample(release["count"], {}, "_count")
    yield Sample(release["sum_seconds"], {}, "_sum")


FAMILIES: tuple[Family, ...] = (
    Family(
        "honed_build",
        "info",
        "",
        "The version of the service",
        lambda document: [Sample(1, {"version": document["version"]})],
    ),
    Family(
        "honed_uptime_seconds",
        "gauge",
        "seconds",
        "Time since the service started",
        _one(lambda d: d["uptime_seconds"]),
    ),
    Family("honed_connections", "gauge", "", "Clients connected now", _one(lambda d: d["connections"])),
    Family(
        "honed_worker_ready",
        "gauge",
        "",
        "1 while the default device has a worker, else 0",
        _one(lambda d: int(d["worker"]["state"] == "ready")),
    ),
    Family(
        "honed_worker_ends",
        "counter",
        "",
        "Ends of the default device's worker: crashed, hung, device (it failed), not started",
        _labelled(lambda d: d["worker"]["ends"], "kind"),
    ),
    Family(
        "honed_device_ready",
        "gauge",
        "",
        "1 while the device has a worker, else 0; 0 for one that stands in for others and is not needed",
        _each_device(lambda d: int(d["worker"]["state"] == "ready")),
    ),
    Family(
        "honed_device_waiting_requests",
        "gauge",
        "requests",
        "Inference requests that wait for the device now",
        _each_device(lambda d: d["queue"]["waiting"]),
    ),
    Family(
        "honed_device_worker_ends",
        "counter",
        "",
        "Ends of the device's worker process, by kind as above",
        _device_ends,
    ),
    Family(
        "honed_queue_requests",
        "gauge",
        "requests",
        "Inference requests that wait for any device now",
        _one(lambda d: d["queue"]["waiting"]),
    ),
    Family(
        "honed_queue_longest_requests",
        "gauge",
        "requests",
        "The most inference requests that ever waited for one device since the service started",
        _one(lambda d: d["queue"]["longest"]),
    ),
    Family(
        "honed_service_requests",
        "counter",
        "",
        "Inference requests, also for models that are unknown or were removed",
        _one(lambda d: d["whole"]["requests"]),
    ),
    Family(
        "honed_service_failures",
        "counter",
        "",
        "Of these, those answered with an error, by its code",
        _labelled(lambda d: d["whole"]["failures"], "code"),
    ),
    Family(
        "honed_model_ready",
        "gauge",
        "",
        "1 while the model can be run, else 0",
        _each_model(lambda m: int(m["ready"])),
    ),
    Family(
        "honed_model_away",
        "gauge",
        "",
        "1 while another device stands in for the model's own, else 0",
        _each_model(lambda m: int(bool(m["away"]))),
    ),
    Family(
        "honed_model_version",
        "gauge",
        "",
        "Number of the version that is served",
        _each_model(lambda m: m["version"]),
    ),
    Family(
        "honed_model_quarantined_versions",
        "gauge",
        "versions",
        "Versions that faulted, were wrong or slower, and are not served again",
        _each_model(lambda m: m["quarantined_versions"]),
    ),
    Family(
        "honed_model_requests",
        "counter",
        "",
        "Inference requests for the model",
        _each_model(lambda m: m["requests"]),
    ),
    Family(
        "honed_model_failures",
        "counter",
        "",
        "Of these, those answered with an error, by its code",
        _failures,
    ),
    Family(
        "honed_model_retries",
        "counter",
        "",
        "Requests run again because their worker failed",
        _each_model(lambda m: m["retries"]),
    ),
    Family(
        "honed_model_answers",
        "counter",
        "",
        "Answered requests, by the engine that answered: cpu, or gpu for compiled forms",
        _answers,
    ),
    Family(
        "honed_model_kernel_executions",
        "counter",
        "",
        "Kernels executed for answered requests",
        _each_model(lambda m: m["kernel_executions"]),
    ),
    Family(
        "honed_model_device_seconds",
        "counter",
        "seconds",
        "Wall time of the model's inferences in the worker, without copying inputs and outputs",
        _each_model(lambda m: m["device_seconds"]),
    ),
    Family(
        "honed_model_latency_seconds",
        "summary",
        "seconds",
        "From a request's arrival to its answer, of answered requests since the service started",
        _summary("latency"),
    ),
    Family(
        "honed_model_queue_seconds",
        "summary",
        "seconds",
        "Of this, the time before the request ran",
        _summary("queue_time"),
    ),
    Family(
        "honed_model_waiting_requests",
        "gauge",
        "requests",
        "Requests for the model that wait now",
        _each_model(lambda m: m["waiting"]),
    ),
    Family(
        "honed_model_spent_seconds",
        "gauge",
        "seconds",
        "Device time that counts when it is decided what to tune: it decays, and outlives restarts",
        _each_model(lambda m: m["spent"]["seconds"]),
    ),
    Family(
        "honed_tuning_trials",
        "counter",
        "",
        "Candidates tried in all, by outcome, as recorded",
        _labelled(_tuning("trials"), "outcome"),
    ),
    Family(
        "honed_tuning_quarantined_candidates",
        "gauge",
        "candidates",
        "Candidates that faulted, hung or took the machine down, and are never run again",
        lambda document: [Sample(document["tuning"]["faults"])] if document["tuning"] else [],
    ),
    Family(
        "honed_tuning_before_seconds",
        "gauge",
        "seconds",
        "Estimated time of one inference when tuning of the model began",
        _gain("before_seconds"),
    ),
    Family(
        "honed_tuning_now_seconds",
        "gauge",
        "seconds",
        "Estimated time of one inference with the best kernels known now",
        _gain("now_seconds"),
    ),
    Family("honed_lease_held", "gauge", "", "1 while a tuner holds the lease on the GPU", _lease("held")),
    Family(
        "honed_lease_seconds",
        "counter",
        "seconds",
        "Time a tuner held the lease on the GPU",
        _lease("seconds"),
    ),
    Family("honed_lease_grants", "counter", "", "Leases given", _lease("grants")),
    Family(
        "honed_lease_revocations",
        "counter",
        "",
        "Leases ended because a request came or the machine was busy",
        _lease("revoked"),
    ),
    Family(
        "honed_lease_overdue",
        "counter",
        "",
        "Of these, those whose tuner was not off the GPU within the bound it had given",
        _lease("overdue"),
    ),
    Family(
        "honed_lease_release_seconds",
        "histogram",
        "seconds",
        "From the arrival of the request that ended a lease until the GPU was free",
        _release,
    ),
    Family(
        "honed_gpu_faults",
        "counter",
        "",
        "Faults of GPUs in the kernel log: of a worker of the service, of another process, of an unknown one",
        _labelled(lambda d: d["gpu_faults"]["counts"] if d["gpu_faults"]["watched"] else {}, "whose"),
    ),
    Family(
        "honed_temperature_celsius",
        "gauge",
        "celsius",
        "Temperatures the kernel tells, by sensor",
        _labelled(lambda d: d["temperatures"], "sensor"),
    ),
)
