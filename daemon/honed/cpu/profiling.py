"""Reads the time of a run, node by node, from ONNX Runtime's own profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from honed.daemon.worker.host import check_timeline
from honed.machine.profile import DeviceIdentity
from honed.protocol.values import ENGINE_NAMES, ModelProfile, ProfiledRow

_KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class NodeRun:
    """A run of a node, in microseconds since the run of the model began.

    `own_us` excludes nodes that ran within it, such as those of a loop's body.
    """

    name: str
    operator: str
    begin_us: float
    end_us: float
    own_us: float


def read(text: str) -> tuple[float, list[NodeRun]]:
    """Return the microseconds of the last run in a profile, and its nodes in the order of their ends."""
    events = [event for event in json.loads(text) if event.get("ph") == "X"]
    whole = [e for e in events if (e.get("cat"), e.get("name")) == ("Session", "model_run")][-1]
    nodes = [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL) and event["ts"] >= whole["ts"]
    ]
    return float(whole["dur"]), _node_runs(nodes, whole["ts"])


def _node_runs(nodes: Iterable[Any], zero: float) -> list[NodeRun]:
    """Return the run of each node; the time of nodes within an outer one is subtracted from its own."""
    done: list[NodeRun] = []
    for event in sorted(nodes, key=lambda event: (event["ts"] + event["dur"], -event["ts"])):
        begin, end = event["ts"] - zero, event["ts"] + event["dur"] - zero
        within = 0.0
        for inner in reversed(done):
            if inner.begin_us < begin or inner.end_us <= begin:
                break
            within += inner.own_us
        own = max(0.0, event["dur"] - within)
        operator = str(event.get("args", {}).get("op_name", ""))
        done.append(NodeRun(event["name"].removesuffix(_KERNEL), operator, begin, end, own))
    return done


def result(
    name: str, whole_us: float, nodes: Sequence[NodeRun], device: DeviceIdentity, *, timeline: bool
) -> ModelProfile:
    """Return the result of ModelProfile for one run of the model called `name`.

    Raises InvalidArgument if a requested timeline would be too long.
    """
    if timeline:
        check_timeline(f"runs {len(nodes)} nodes", len(nodes))
    rows: dict[str, list[NodeRun]] = {}
    for node in nodes:
        rows.setdefault(node.name, []).append(node)
    sum_us = sum(node.own_us for node in nodes)
    spans = tuple((node.name, node.begin_us, node.end_us, None, None) for node in nodes)
    return ModelProfile(
        name=name,
        runs=1,
        launches=len(nodes),
        whole_us=whole_us,
        sum_us=sum_us,
        device=device,
        peaks=None,
        rows=tuple(_row(runs, sum_us) for runs in rows.values()),
        engine="cpu",
        engine_name=ENGINE_NAMES["cpu"],
        timeline=spans if timeline else None,
    )


def _row(runs: Sequence[NodeRun], sum_us: float) -> ProfiledRow:
    us = sum(run.own_us for run in runs)
    return ProfiledRow(
        name=runs[0].name,
        kind="node",
        task="",
        schedule=runs[0].operator,
        count=len(runs),
        us=us,
        share=us / sum_us if sum_us else 0.0,
        gflops=None,
        gbs=None,
        peak_share=None,
    )
