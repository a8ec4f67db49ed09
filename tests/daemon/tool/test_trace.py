"""A profile as a trace in Chrome's trace event format, as its rules ask for it."""

from __future__ import annotations

import json

from honed.protocol.results import ModelPlacement, ModelShown, ModelSource
from honed.protocol.values import DeviceIdentity, ModelProfile, ProfiledRow, ShownKernel
from honed.tool.commands.profiling import trace

KERNEL = ShownKernel(
    name="add", grid=(4, 1, 1), block=(64, 1, 1), flops=256, bytes=3072, task="t1", schedule="prior:cpu-1",
    launches=2, prepared=0,
)  # fmt: skip
DEVICE = DeviceIdentity(platform="", vendor="", name="a device", driver_version="1.2", kernel_driver="")
SOURCE = ModelSource(sha256="", filename="", producer="", opset=None, precision="fp32", choice=None)
SHOWN = ModelShown(
    name="small", state="READY", reason="", sha256="ab", bytes=1, added=0.0, source=SOURCE, shapes={},
    precision="auto", notes=(), compiler={}, device=DEVICE, inputs=(), outputs=(), proof=None,
    placement=ModelPlacement(device="", served_by="", engine="gpu", why="", away=""), checked=None,
    kernels=(KERNEL,), launches=2, copies=1, host_calls=1, constant_bytes=0, arena_bytes=0, prepared_bytes=0,
)  # fmt: skip


def _row(name: str, kind: str) -> ProfiledRow:
    known = kind == "kernel"
    return ProfiledRow(
        name=name, kind=kind, task="t1" if known else "", schedule="prior:cpu-1" if known else "",
        count=1, us=10.0, share=0.3, gflops=1.0, gbs=1.0, peak_share=0.5 if known else None,
    )  # fmt: skip


PROFILE = ModelProfile(
    name="small</script>",
    runs=1,
    launches=2,
    whole_us=120.0,
    sum_us=30.0,
    device=DEVICE,
    peaks=None,
    rows=(_row("add", "kernel"), _row("(copy)", "copy"), _row("(topk)", "host")),
    timeline=(
        ("add", 1.0, 3.0, 5.0, 15.0),
        ("(topk)", 20.0, 30.0, None, None),
        ("add", 31.0, 32.0, 40.0, 50.0),
        ("(copy)", 33.0, 34.0, 50.0, 60.0),
    ),
)


def test_every_event_keeps_the_rules_of_the_format() -> None:
    document = json.loads(json.dumps(trace(PROFILE, SHOWN), allow_nan=False))
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
        else:
            assert event["ph"] in ("s", "f")
            assert "id" in event
            assert event["ph"] == "s" or event["bp"] == "e"
    named = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert named == ["host", "device"]
    assert document["otherData"]["device"] == "a device"


def test_rows_are_the_host_and_the_device() -> None:
    spans = [e for e in trace(PROFILE, SHOWN)["traceEvents"] if e["ph"] == "X"]
    host = [(e["name"], e["ts"], e["dur"]) for e in spans if e["tid"] == 1]
    assert host == [
        ("inference", 0.0, 120.0),
        ("enqueue add", 1.0, 2.0),
        ("(topk)", 20.0, 10.0),
        ("enqueue add", 31.0, 1.0),
        ("enqueue (copy)", 33.0, 1.0),
    ]
    device = [(e["name"], e["ts"], e["dur"]) for e in spans if e["tid"] == 2]
    assert device == [("add", 5.0, 10.0), ("add", 40.0, 10.0), ("(copy)", 50.0, 10.0)]
    (first, *_) = (e for e in spans if e["tid"] == 2)
    assert first["args"] == {
        "task": "t1", "schedule": "prior:cpu-1", "share of peak": 0.5, "groups": "4x1x1", "items": "64x1x1",
        "operations": 256, "bytes": 3072,
    }  # fmt: skip


def test_arrows_lead_from_each_command_to_where_it_is_computed() -> None:
    arrows = [e for e in trace(PROFILE, SHOWN)["traceEvents"] if e["ph"] in ("s", "f")]
    starts = {e["id"]: e for e in arrows if e["ph"] == "s"}
    ends = {e["id"]: e for e in arrows if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 3
    for number, start in starts.items():
        assert (start["tid"], ends[number]["tid"]) == (1, 2)
        assert start["ts"] <= ends[number]["ts"]
        assert (start["name"], start["cat"]) == (ends[number]["name"], ends[number]["cat"])
