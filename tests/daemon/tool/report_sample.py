"""A report in which everything is that a page can tell of: models on every engine, faults of every kind."""

from __future__ import annotations

from honed.daemon.observe.faults import SERVICE, AttributedFault
from honed.jobs.events import History, Point, Quarantined, TunedVersion
from honed.protocol.params import Gain, TuningFigures
from honed.protocol.results import (
    DeploymentSpan,
    IndexedModel,
    LatencyPoint,
    ModelChecked,
    ModelHistory,
    ModelPlacement,
    ModelShown,
    ModelSource,
    ModelVersion,
    ShownVariant,
)
from honed.protocol.service import (
    DeviceFigures,
    DeviceStatus,
    DurationSummary,
    FaultFigures,
    Figures,
    IdleStatus,
    JobStatus,
    LeaseFigures,
    LeaseStatus,
    Metrics,
    ModelFigures,
    QueueFigures,
    QueueStatus,
    RecentFigures,
    ReleaseFigures,
    Releases,
    ServicePlaces,
    SignalReading,
    Status,
    TimeSpent,
    TunerStatus,
    WorkerEnd,
    WorkerFigures,
    WorkerStatus,
)
from honed.protocol.values import (
    ComparedOutput,
    DeviceIdentity,
    DevicePeaks,
    ModelProof,
    PartitionInfo,
    ShownKernel,
    TensorMetadata,
)
from honed.report.contents import Report, ReportedFaults, ReportedModel, ReportedVariant

BEGUN = 1.795e9  # seconds since 1970
MALI = DeviceIdentity(
    platform="ARM Platform",
    vendor="ARM",
    name="Mali-G610 r0p0",
    driver_version="3.0 v1.g13p0-01eac0",
    kernel_driver="kbase",
)
PEAKS = DevicePeaks(
    fp32_gflops=457.0,
    fp16_gflops=903.0,
    bandwidth_gbs=22.4,
    launch_us=14.2,
    caches_gbs=((1 << 16, 171.0), (1 << 20, 62.0), (1 << 25, 22.4)),
    raised=("bandwidth_gbs",),
    busy=0.4,
)
NONE = DurationSummary(count=0, sum=0.0, p50=None, p95=None, p99=None, max=None)
SOME = DurationSummary(count=900, sum=9.0, p50=0.0098, p95=0.0131, p99=0.0204, max=0.091)
WAITED = DurationSummary(count=900, sum=0.1, p50=0.00011, p95=0.0002, p99=0.004, max=0.02)
FIGURES = {
    "requests": 903,
    "served": 900,
    "failures": {"DEADLINE_EXCEEDED": 3},
    "retries": 1,
    "engines": {"gpu": 880, "cpu": 20},
    "kernel_executions": 12345,
    "device_seconds": 7.5,
    "latency": SOME,
    "queue_time": WAITED,
    "recent": RecentFigures(seconds=60.0, per_second=2.5, latency=SOME),
}
WORKER = WorkerStatus(state="ready", pid=12, restarts=2, reason="")


def sample() -> Report:
    """Three models: one tuned on the device, one in parts, one that failed."""
    return Report(
        made=BEGUN + 90_000,
        host="board",
        system="Linux 6.1.43, aarch64",
        status=_status(),
        metrics=_metrics(),
        models=(_tuned(), _in_parts(), _failed()),
        faults=ReportedFaults(quarantined=_quarantined(), log=_log(), log_reason=""),
        notes=("something could not be asked for: the reason",),
    )


def _tuned() -> ReportedModel:
    name = "lightglue"
    numbers = range(1, 6)
    us = {number: 91_000 * 0.62 ** (number - 1) for number in numbers}
    versions = tuple(
        ModelVersion(
            number=number,
            sha256=f"{number}" * 64,
            nbytes=42 << 20,
            schedules=f"schedules-{number}",
            made=BEGUN + 9_000 * number,
            why="added" if number == 1 else f"idle tuning: {60 * number} trials in 90 s",
            old_us=None if number == 1 else us[number] / 0.62,
            new_us=None if number == 1 else us[number],
            settled=True,
            kept=number > 3,
            quarantine="it is slower in service (9.1 ms before, 11.2 ms now)" if number == 4 else "",
        )
        for number in numbers
    )
    served = (1, 2, 3, 4, 3, 5)
    spans = tuple(
        DeploymentSpan(
            number=number,
            since=BEGUN + 12_000 * at,
            until=BEGUN + 12_000 * (at + 1) if at < 5 else None,
            end=f"version {served[at + 1]} followed" if at < 5 else "",
        )
        for at, number in enumerate(served)
    )
    latency = tuple(
        LatencyPoint(
            time=span.since + 200 * step,
            version=span.number,
            count=40,
            us=us[span.number] * (1 + 0.04 * (step * 7 % 5)),
        )
        for span in spans
        for step in range(60 if span.number != 2 else 1)
    )
    tuned = History(
        points=tuple(
            Point(time=BEGUN + 60 * n, us=91_000 * 0.985**n, trials=4 * n) for n in range(0, 160, 2)
        ),
        versions=tuple(
            TunedVersion(
                version=number,
                why="tuned",
                us=us[number],
                time=BEGUN + 9_000 * number,
                trials=150 * (number - 1),
            )
            for number in numbers[1:]
        ),
    )
    kernels = tuple(
        ShownKernel(
            name=f"fused_matmul{n}_add",
            grid=(8, 8, 1),
            block=(64, 1, 1),
            flops=10**9,
            bytes=10**6,
            task=f"task{n}",
            schedule="measured:evolution:0123456789ab" if n < 9 else "prior:0123456789ab",
            launches=9,
            prepared=0,
        )
        for n in range(20)
    )
    return ReportedModel(
        listed=_listed(name, variants=2),
        shown=_shown(name, kernels=kernels, variants=_variants(name)),
        history=ModelHistory(
            name=name,
            version=5,
            pinned=True,
            on_trial=True,
            versions=versions,
            deployments=spans,
            latency=latency,
        ),
        figures=_figures(name, version=5, tasks={f"task{n}": 100.0 / (n + 1) for n in range(20)}),
        variants=(
            ReportedVariant(figures=_figures(f"{name}@191x200", version=2, tasks={}), history=_halved(name)),
        ),
        tuned=tuned,
    )


def _halved(model: str) -> ModelHistory:
    """Of a variant that tuning made twice as fast."""
    versions = tuple(
        ModelVersion(
            number=number, sha256="", nbytes=1, schedules="", made=BEGUN, why="tuned", settled=True,
            old_us=16_200.0 if number == 2 else None, new_us=8_100.0 if number == 2 else None, kept=True,
            quarantine="",
        )
        for number in (1, 2)
    )  # fmt: skip
    spans = tuple(DeploymentSpan(number=number, since=BEGUN, until=None, end="") for number in (1, 2))
    return ModelHistory(
        name=f"{model}@191x200", version=2, pinned=False, on_trial=False, versions=versions,
        deployments=spans, latency=(),
    )  # fmt: skip


def _in_parts() -> ReportedModel:
    name = "detector"
    parts = (
        PartitionInfo(engine="gpu", nodes=120, flops=10**10),
        PartitionInfo(
            engine="cpu",
            nodes=9,
            flops=10**6,
            why=("NonMaxSuppression (node nms_0): its output's shape depends on the data",),
            inputs=(TensorMetadata(name="boxes", datatype="FP32", shape=(1, 3549, 4)),),
            outputs=(TensorMetadata(name="kept", datatype="INT64", shape=(-1, 3)),),
            last=True,
        ),
    )
    return ReportedModel(
        listed=_listed(name, engine="gpu+cpu"),
        shown=_shown(name, parts=parts),
        history=ModelHistory(
            name=name, version=1, pinned=False, on_trial=False, versions=(), deployments=(), latency=()
        ),
        figures=_figures(name, version=1, tasks={}),
        variants=(),
        tuned=None,
    )


def _failed() -> ReportedModel:
    name = "broken"
    listed = _listed(name, engine="cpu", state="UNAVAILABLE", reason="4 workers in a row failed running it")
    return ReportedModel(
        listed=listed,
        shown=_shown(name, compiled=False),
        history=ModelHistory(
            name=name, version=0, pinned=False, on_trial=False, versions=(), deployments=(), latency=()
        ),
        figures=_figures(name, version=0, tasks={}, served=0),
        variants=(),
        tuned=History(points=(), versions=()),
    )


def _listed(
    name: str, *, engine: str = "gpu", state: str = "READY", reason: str = "", variants: int = 0
) -> IndexedModel:
    why = "compiled 9.8 ms, ONNX Runtime 31.2 ms, measured in turns"
    return IndexedModel(
        name=name, version="1", state=state, reason=reason, engine=engine, engine_why=why, variants=variants,
        pinned_engine="gpu" if variants else "",
    )  # fmt: skip


def _shown(
    name: str,
    *,
    kernels: tuple[ShownKernel, ...] = (),
    variants: tuple[ShownVariant, ...] = (),
    parts: tuple[PartitionInfo, ...] = (),
    compiled: bool = True,
) -> ModelShown:
    outputs = (ComparedOutput(name="scores", tolerance=0.001, error=1.5e-6),)
    return ModelShown(
        name=name,
        state="READY",
        reason="",
        sha256="0" * 64,
        bytes=42 << 20,
        added=BEGUN,
        source=ModelSource(
            sha256="1" * 64, filename=f"{name}.onnx", producer="pytorch", opset=17, precision="mixed",
            choice=None,
        ),
        shapes={},
        precision="auto",
        notes=("the leading dimension of input 'x' is taken as 1",),
        compiler={"honed": "0.1.0"} if compiled else {},
        device=MALI,
        inputs=(TensorMetadata(name="kpts0", datatype="FP32", shape=(1, -1, 2)),),
        outputs=(TensorMetadata(name="scores", datatype="FP32", shape=(1, -1, -1)),),
        proof=ModelProof(reference="onnxruntime 1.23", probes=3, device=MALI.name, outputs=outputs)
        if compiled
        else None,
        placement=ModelPlacement(
            device="", served_by="ARM Platform/Mali-G610", engine="gpu", why="the compiled form is faster",
            away="",
        ),
        checked=ModelChecked(device=MALI.name, outputs=outputs) if compiled else None,
        kernels=kernels,
        launches=669,
        copies=2,
        host_calls=0,
        constant_bytes=40 << 20,
        arena_bytes=4 << 20,
        prepared_bytes=0,
        variants=variants,
        parts=parts,
    )  # fmt: skip


def _variants(model: str) -> tuple[ShownVariant, ...]:
    ready = ShownVariant(
        name=f"{model}@191x200",
        shapes={"kpts0": (1, 191, 2)},
        requests=812.0,
        answered=640,
        state="READY",
        engine="gpu",
        version=1,
        why="compiled 8.1 ms, ONNX Runtime 29.9 ms",
        by_hand=True,
        bytes=3 << 20,
        loaded_bytes=9 << 20,
    )
    failed = ShownVariant(
        name=f"{model}@1x1",
        shapes={"kpts0": (1, 1, 2)},
        requests=4.0,
        answered=0,
        state="FAILED",
        engine="cpu",
        version=0,
        why="the compiled model does not give the reference's answers",
        by_hand=False,
        bytes=0,
        loaded_bytes=0,
    )
    return ready, failed


def _figures(name: str, *, version: int, tasks: dict[str, float], served: int = 900) -> ModelFigures:
    figures = FIGURES if served else FIGURES | {
        "served": 0, "engines": {}, "latency": NONE, "queue_time": NONE,
        "recent": RecentFigures(seconds=60.0, per_second=0.0, latency=NONE),
    }  # fmt: skip
    seconds = sum(tasks.values()) * 1.1 or 40.0
    return ModelFigures(
        **figures,  # type: ignore[arg-type]
        name=name,
        version=version,
        quarantined_versions=0,
        sha256="0" * 64,
        state="READY" if served else "UNAVAILABLE",
        ready=bool(served),
        away="",
        engine="gpu",
        device="ARM Platform/Mali-G610",
        waiting=0,
        spent=TimeSpent(seconds=seconds if served else 0.0, tasks=tasks, profiled=""),
    )


def _quarantined() -> tuple[Quarantined, ...]:
    return tuple(
        Quarantined(
            candidate="0123456789ab",
            task=f"task{n}",
            name=f"fused_conv2d{n}_add",
            outcome="faulted" if n % 2 else None,
            reason="page fault",
            story="mali fb000000.gpu: Unhandled Page fault in AS1\nReason: Memory is not mapped on the GPU",
            time=BEGUN + n,
            device=MALI.name,
            driver_version=MALI.driver_version,
            measured_by="",
        )
        for n in range(12)
    )


def _log() -> tuple[AttributedFault, ...]:
    records = (
        "mali fb000000.gpu: Unhandled Page fault in AS1 at VA 0x00007FE0DA65CB80",
        "Reason: Memory is not mapped on the GPU",
        "exception type 0xC1: TRANSLATION_FAULT at level 1",
    )
    return (
        AttributedFault(
            time=BEGUN + 5,
            driver="kbase",
            device="fb000000.gpu",
            severity="context",
            code=0xC1,
            meaning="translation fault, level 1",
            process=1693,
            command="python3",
            records=records,
            whose=SERVICE,
        ),
    )


def _status() -> Status:
    queue = QueueStatus(waiting=1, running=1)
    mali = DeviceStatus(
        name="", engine="gpu", default=True, stand_in=False, spec="ARM Platform/Mali-G610", device=MALI,
        peaks=PEAKS, worker=WORKER, queue=queue, models=("lightglue", "detector"), away=(),
    )  # fmt: skip
    cpu = DeviceStatus(
        name="ONNX Runtime/CPU", engine="cpu", default=False, stand_in=False, spec="ONNX Runtime/CPU",
        device=None, peaks=None, worker=WORKER, queue=queue, models=("broken",), away=("other",),
    )  # fmt: skip
    readings = (
        SignalReading(signal="queue", value=1.0, unit="", verdict="busy", text="requests not answered yet"),
        SignalReading(signal="gpu", value=None, unit="%", verdict="absent", text="no driver tells"),
    )
    return Status(
        name="honed",
        version="0.1.0",
        pid=10,
        uptime_seconds=90_000.0,
        places=ServicePlaces(socket="/run/honed/honed.sock", state_dir="/var/lib/honed", cache_dir="/c"),
        device=MALI,
        device_spec="",
        peaks=PEAKS,
        worker=WORKER,
        devices=(mali, cpu),
        models={"READY": 2, "UNAVAILABLE": 1},
        queue=queue,
        connections=3,
        jobs=(JobStatus(model_name="new", stage="compile", fraction=0.4, text="lower functions"),),
        damaged=("old: its file was altered",),
        idle=IdleStatus(idle=False, why="queue 1: requests not answered yet", readings=readings, models={}),
        lease=LeaseStatus(
            state="free", holder=None, waiting=0, granted=41, revoked=12, overdue=1, seconds=8000.0,
            release=Releases(count=12, p50_ms=8.1, p99_ms=60.0, max_ms=61.0, sum_seconds=0.2, buckets=()),
        ),
        tuner=TunerStatus(pid=13, text="waiting for the lease"),
    )  # fmt: skip


def _metrics() -> Metrics:
    ends = (WorkerEnd(time=BEGUN + 70_000, pid=11, kind="crashed", reason="it was killed by signal 11"),)
    worker = WorkerFigures(state="ready", reason="", starts=2, ends={"crashed": 1}, last_ends=ends)
    queue = QueueFigures(waiting=1, running=1, longest=9)
    return Metrics(
        version="0.1.0",
        pid=10,
        time=BEGUN + 90_000,
        uptime_seconds=90_000.0,
        device=MALI,
        device_time="wall time of inferences in the worker",
        worker=worker,
        devices=(DeviceFigures(name="", shown="ARM Platform/Mali-G610", worker=worker, queue=queue),),
        queue=queue,
        connections=3,
        whole=Figures(**FIGURES),  # type: ignore[arg-type]
        models=(),
        tuning=TuningFigures(
            trials={"right": 2400, "wrong": 31, "faulted": 6},
            faults=12,
            gains={"lightglue": Gain(before_seconds=0.091, now_seconds=0.013)},
        ),
        temperatures={"gpu-thermal": 61.5, "soc-thermal": 55.0},
        lease=LeaseFigures(
            held=False, seconds=8000.0, grants=41, revoked=12, overdue=1,
            release=ReleaseFigures(count=12, sum_seconds=0.2, buckets=()),
        ),
        gpu_faults=FaultFigures(watched=True, reason="", counts={"service": 1, "other": 0, "unknown": 0}),
    )  # fmt: skip
