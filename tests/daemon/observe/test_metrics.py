"""Metrics of a real daemon: right, never going down, understood by another's parser, and documented."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from honed.daemon.idle.signals import temperatures
from honed.daemon.observe.openmetrics import FAMILIES, Family, MetricSample, _lines
from honed.protocol.methods import METRICS
from honed.protocol.params import Gain, MetricsParams, TuningFigures
from honed.runtime import AsyncClient, Client
from honed.runtime.errors import InvalidArgument, NotFound
from honed.tool.main import main
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service, wait_for
from tests.runtime.builder import chain

X = np.linspace(-3, 4, SIZE, dtype=np.float32)
Key = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: str) -> dict[Key, float]:
    """Every sample, as a collector reads it."""
    assert text.endswith("# EOF\n")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Mapping[Key, float], name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def counters(text: str) -> dict[Key, float]:
    kept: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter" or sample.name.endswith(("_count", "_sum")):
                kept[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return kept


@pytest.mark.service
@pytest.mark.opencl
def test_every_figure_of_a_model(client: Client) -> None:
    before = parsed(client.openmetrics())
    for _ in range(20):
        client.infer("small", {"x": X})
    for error, inputs, options in (
        (InvalidArgument, {"x": X[:2]}, {}),
        (InvalidArgument, {"x": X * np.nan}, {"finite": True}),
    ):
        with pytest.raises(error):
            client.infer("small", inputs, **options)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        client.infer("nope", {"x": X})
    after = parsed(client.openmetrics())

    def grew(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert grew("honed_model_requests_total", model="small") == 22
    assert grew("honed_model_failures_total", model="small", code="INVALID_ARGUMENT") == 2
    assert grew("honed_model_kernel_executions_total", model="small") == 40
    assert grew("honed_model_latency_seconds_count", model="small") == 20
    assert grew("honed_service_requests_total") == 23
    assert grew("honed_service_failures_total", code="NOT_FOUND") == 1
    device = grew("honed_model_device_seconds_total", model="small")
    assert 0 < device < grew("honed_model_latency_seconds_sum", model="small") < 60
    assert grew("honed_model_spent_seconds", model="small") == pytest.approx(device, rel=0.2)
    quantiles = [
        of(after, "honed_model_latency_seconds", model="small", quantile=q) for q in ("0.5", "0.95", "0.99")
    ]
    assert quantiles == sorted(quantiles)
    assert of(after, "honed_worker_ready") == 1
    assert of(after, "honed_queue_longest_requests") >= 1
    assert of(after, "honed_build_info", version=client.metrics()["version"]) == 1


@pytest.mark.service
@pytest.mark.opencl
def test_plain_data_says_the_same(client: Client) -> None:
    client.infer("small", {"x": X})
    client.profile("small", runs=1)
    document = client.metrics()
    samples = parsed(client.openmetrics())
    (model,) = [each for each in document["models"] if each["name"] == "small"]
    assert model["requests"] == of(samples, "honed_model_requests_total", model="small")
    names = {"engine": "gpu", "engine_name": "opencl", "device": model["device"]}
    assert of(samples, "honed_model_engine_info", model="small", **names) == 1
    assert model["recent"]["per_second"] > 0
    assert model["recent"]["latency"]["count"] <= model["latency"]["count"]
    assert sum(model["spent"]["tasks"].values()) <= model["spent"]["seconds"] * 1.001
    assert model["spent"]["tasks"]
    assert document["device_time"] == "wall time of inferences in the worker"
    with pytest.raises(InvalidArgument, match="openmetrics"):
        client.ask(METRICS, MetricsParams(format="xml"))


@pytest.mark.service
@pytest.mark.opencl
def test_what_tuners_report_is_told(client: Client) -> None:
    gains = {"small": Gain(before_seconds=0.9, now_seconds=0.3)}
    client.report("at work", TuningFigures(trials={"right": 2, "faulted": 1}, faults=1, gains=gains))
    assert client.metrics()["tuning"] == {
        "trials": {"right": 2, "faulted": 1},
        "faults": 1,
        "gains": {"small": {"before_seconds": 0.9, "now_seconds": 0.3}},
        "hints": {},
        "reason": "",
    }
    samples = parsed(client.openmetrics())
    assert of(samples, "honed_tuning_trials_total", outcome="right") == 2
    assert of(samples, "honed_tuning_quarantined_candidates") == 1
    assert of(samples, "honed_tuning_now_seconds", model="small") == 0.3


@pytest.mark.service
@pytest.mark.opencl
def test_the_other_client_says_the_same(service: Service, client: Client) -> None:
    async def ask() -> tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]:
        async with AsyncClient(service.socket) as other:
            return (
                await other.metrics(),
                await other.openmetrics(),
                await other.config(),
                await other.reload_config(),
            )

    document, text, config, reloaded = asyncio.run(ask())
    assert set(document) == set(client.metrics())
    assert of(parsed(text), "honed_worker_ready") == 1
    assert config == client.config()
    assert reloaded == {"applied": [], "restart": [], "files": config["files"]}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_counters_never_go_down(
    start_service: Callable[..., Service], small_model: Path, tmp_path: Path
) -> None:
    """Not under load, when a model is replaced or removed, or when the worker dies."""
    service = start_service()
    other = chain(3, SIZE).write(tmp_path / "other.honed")
    seen: list[dict[Key, float]] = []
    stop = threading.Event()
    failed: list[Exception] = []

    def load() -> None:
        try:
            with service.client() as busy:
                while not stop.is_set():
                    busy.infer("kept", {"x": X})
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    def kill_while_it_runs_a_request() -> None:
        """Stopped first, so that a request is sent to it for certain and must be run again."""
        worker = service.worker
        assert worker is not None
        worker.suspend()
        wait_for(lambda: client.status()["queue"]["running"] == 1, "a request to be running", service)
        worker.kill()

    with service.client() as client:
        client.add(small_model, name="kept")
        client.add(small_model, name="gone")
        client.infer("gone", {"x": X})
        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for step in (
                lambda: client.add(small_model, name="kept", replace=True),
                lambda: client.add(other, name="other"),
                lambda: client.remove("gone"),
                kill_while_it_runs_a_request,
                service.wait_ready,
            ):
                seen.append(counters(client.openmetrics()))
                step()
                served = seen[-1]["honed_service_requests_total", ()]
                wait_for(
                    lambda before=served: client.metrics()["whole"]["requests"] > before + 5,
                    "more requests",
                    service,
                )
            wait_for(lambda: client.metrics()["whole"]["retries"] >= 1, "a request that ran again", service)
            seen.append(counters(client.openmetrics()))
            (end,) = client.metrics()["worker"]["last_ends"]
            assert (end["kind"], end["reason"]) == ("crashed", "it was ended by signal SIGKILL")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not failed
    for earlier, later in itertools.pairwise(seen):
        for key, value in earlier.items():
            if dict(key[1]).get("model") != "gone":
                assert later[key] >= value, key
    last = seen[-1]
    assert last["honed_worker_ends_total", (("kind", "crashed"),)] == 1
    assert last["honed_model_retries_total", (("model", "kept"),)] >= 1
    assert not any(("model", "gone") in key[1] for key in last)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_a_hung_worker_is_told_from_a_crashed_one(
    start_service: Callable[..., Service], small_model: Path
) -> None:
    service = start_service(config="[limits]\nrun_seconds = 10\n")
    with service.client() as client:
        client.add(small_model, name="small")
        assert service.worker is not None
        service.worker.suspend()
        np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], X + np.arange(SIZE) + 1)
        document = client.metrics()
    assert document["worker"]["ends"] == {"hung": 1}
    assert document["worker"]["last_ends"][0]["reason"] == "it did not finish within 10 s"
    assert document["whole"]["retries"] == 1
    assert document["whole"]["failures"] == {}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_use_outlives_a_power_cut(start_service: Callable[..., Service], small_model: Path) -> None:
    """At most one interval is lost."""
    settings = "[usage]\nsave_seconds = 0.1\n"
    service = start_service(config=settings)
    file = service.state / "usage.json"

    def spent(client: Client) -> float:
        return float(client.metrics()["models"][0]["spent"]["seconds"])

    def saved() -> float:
        models = json.loads(file.read_text())["models"]  # the first save may be from before the first request
        return float(models["small"]["seconds"]) if "small" in models else 0.0

    with service.client() as client:
        client.add(small_model, name="small")
        client.infer("small", {"x": X})
        wait_for(file.exists, "the first save", service)
        for _ in range(20):
            client.infer("small", {"x": X})
        before = spent(client)
        wait_for(lambda: saved() > 0.99 * before, "the next save", service)
    service.kill()
    again = start_service(service.state, config=settings)
    with again.client() as client:
        assert 0.9 * before < spent(client) <= before * 1.001
        client.infer("small", {"x": X})
        now = spent(client)
    again.stop()
    with start_service(service.state).client() as client:
        assert spent(client) == pytest.approx(now, rel=1e-3), "saved at the end"


@pytest.mark.service
@pytest.mark.opencl
def test_the_command(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    assert main(["metrics"]) == 0
    assert of(parsed(capsys.readouterr().out), "honed_worker_ready") == 1
    assert main(["metrics", "--json"]) == 0
    assert '"kernel_executions"' in capsys.readouterr().out


@given(st.text(), st.text(), st.floats())
def test_any_label_and_number_is_read_back(name: str, about: str, value: float) -> None:
    family = Family("gauge", "t", about, lambda _: [MetricSample(value, {"model": name})])
    text = "".join(f"{line}\n" for line in _lines(family, {})) + "# EOF\n"
    (found,) = text_string_to_metric_families(text)
    (sample,) = found.samples
    assert sample.labels == {"model": name}
    assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


def test_names_end_in_their_unit() -> None:
    for family in FAMILIES:
        assert not family.unit or family.name.endswith(f"_{family.unit}")


def test_temperatures(tmp_path: Path) -> None:
    assert temperatures(tmp_path) == {}
    zones = tmp_path / "sys/class/thermal"
    for number, (kind, text) in enumerate(
        [
            ("soc-thermal", "41000\n"),
            ("gpu-thermal", "45500"),
            ("gpu-thermal", "47250"),
            ("off", "-273150"),
            ("odd", "x"),
        ]
    ):
        zone = zones / f"thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(kind)
        (zone / "temp").write_text(text)
    (zones / "thermal_zone9").mkdir()
    (zones / "cooling_device0").mkdir()
    assert temperatures(tmp_path) == {"soc-thermal": 41.0, "gpu-thermal": 47.25}
