"""`hone` against a real daemon: every command that talks to the service, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.daemon.observe.faults import OTHER, SERVICE, ours
from honed.machine.devices import Device
from honed.machine.kernellog.reader import Record
from honed.protocol.methods import METRICS, SERVER_STATUS
from honed.protocol.params import MetricsParams, Nothing
from honed.report.command import page
from honed.report.contents import gather
from honed.runtime import Client
from honed.tool.main import main
from tests.daemon.conftest import SIZE, Hone
from tests.daemon.observe.test_attribution import FAULT, Log
from tests.daemon.running import Service
from tests.pocl import ALL
from tests.runtime.builder import Builder, add_constant, add_prepared

from .test_report import MayNotChange, parsed, words

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.linspace(-3, 4, SIZE, dtype=np.float32)
Y = X + np.arange(SIZE, dtype=np.float32) + 1


@pytest.fixture
def hone(service: Service, monkeypatch: pytest.MonkeyPatch, typed: Hone) -> Hone:
    """Runs the tool against the module's daemon."""
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    return typed


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "x=1.npy"
    np.save(file, X)
    return file


def document(result: tuple[int, str, str]) -> dict[str, Any]:
    status, out, _ = result
    assert status == 0
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def test_status(hone: Hone, service: Service) -> None:
    status = document(hone("status", "--json"))
    assert status["pid"] == service.process.pid
    assert status["worker"]["state"] == "ready"
    _, text, _ = hone("status")
    assert f"process {service.process.pid}" in text
    assert str(service.socket) in text
    assert status["device"]["name"] in " ".join(text.split())
    assert "1 ready" in text


def test_list(hone: Hone) -> None:
    (model,) = document(hone("list", "--json"))["models"]
    assert (model["name"], model["state"]) == ("small", "READY")
    _, text, _ = hone("list")
    headings = ["model", "state", "engine", "device", "inferences", "mean", "ms", "reason"]
    assert text.splitlines()[0].split() == headings
    assert text.splitlines()[1].split()[:3] == ["small", "ready", "opencl"]
    assert (model["engine"], model["engine_name"]) == ("gpu", "opencl")
    assert ALL in model["device"]


def test_infer_from_a_file(hone: Hone, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    status, text, _ = hone("infer", "small", "--input", f"x={saved}", "--output-dir", str(folder))
    assert status == 0
    np.testing.assert_array_equal(np.load(folder / "y.npy"), Y)
    assert f"float32 [{SIZE}]" in text
    assert f"{Y.min():.6g}" in text
    again = document(hone("infer", "small", "--input", f"x={saved}", "--output-dir", str(folder), "--json"))
    (output,) = again["outputs"]
    assert output["file"] == str(folder / "y.npy")
    assert (output["min"], output["max"]) == (Y.min(), Y.max())
    assert (again["engine"], again["engine_name"]) == ("gpu", "opencl")
    assert ALL in again["device"]
    assert [p.name for p in folder.iterdir()] == ["y.npy"]


def test_several_files_are_added_one_by_one(hone: Hone, device: Device, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("one", "two"):
        add_constant().write(folder / f"{name}.honed", device.profile)
    (folder / "broken.honed").write_bytes(b"no model")
    (folder / "notes.txt").write_text("no model either")
    status, out, error = hone("add", str(folder), "--json")
    assert status == 1
    assert f"hone: {folder}/broken.honed: " in error
    told = json.loads(out)["files"]
    assert [Path(each["file"]).stem for each in told] == ["broken", "one", "two"]
    assert [each["error"] is None for each in told] == [False, True, True]
    assert [each["added"] and each["added"]["model_name"] for each in told] == [None, "one", "two"]
    status, out, _ = hone("add", str(folder / "one.honed"), str(folder / "two.honed"), "--replace")
    assert status == 0
    assert "one is served" in out
    assert "two is served" in out
    for name in ("one", "two"):
        hone("remove", name)
    assert hone("add", str(folder), "--name", "x")[0] == 2
    assert hone("add", str(tmp_path / "models" / ".."))[0] == 2


def test_infer_with_made_up_inputs_is_repeatable(hone: Hone) -> None:
    def outputs(*arguments: str) -> list[Any]:
        found: list[Any] = document(hone("infer", "small", "--random", *arguments, "--json"))["outputs"]
        return found

    first = outputs()
    assert outputs() == first
    assert outputs("--seed", "1") != first
    assert first[0]["file"] is None


def test_nan_is_a_value_and_the_json_stays_json(hone: Hone, tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.full(SIZE, np.nan, np.float32))
    (output,) = document(hone("infer", "small", "--input", f"x={tmp_path}/nan.npy", "--json"))["outputs"]
    assert (output["min"], output["max"], output["not_finite"]) == (None, None, SIZE)
    _, text, _ = hone("infer", "small", "--input", f"x={tmp_path}/nan.npy")
    assert f"y has {SIZE} elements that are NaN or infinite" in text


def test_infer_refuses_what_does_not_fit(hone: Hone, saved: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        status, out, error = hone("infer", "small", *arguments)
        assert out == ""
        assert error.startswith("hone: ")
        assert error.count("\n") == 1
        return status, error

    def given(name: str, content: bytes | None) -> tuple[int, str]:
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        return said("--input", f"x={file}")

    assert said() == (2, f"hone: small needs x (float32 [{SIZE}]); give each with --input NAME=FILE.npy, "
                         "or --random to have them made up\n")  # fmt: skip
    assert "has no input 'z'; its inputs are x" in said("--input", f"z={saved}")[1]
    assert "twice" in said("--input", f"x={saved}", "--input", f"x={saved}")[1]
    status, error = given("none.npy", None)
    assert (status, "there is no file" in error) == (1, True)
    for content in (b"", b"text", saved.read_bytes()[:-1], saved.read_bytes()[:40]):
        assert "not a .npy file of numbers" in given("bad.npy", content)[1]
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "not a .npy file of numbers" in given("object.npy", None)[1]
    np.savez(tmp_path / "many.npz", X)
    assert "several arrays" in given("many.npz", None)[1]
    np.save(tmp_path / "double.npy", X.astype(np.float64))
    assert f"float64 [{SIZE}] and input x is float32 [{SIZE}]" in given("double.npy", None)[1]
    np.save(tmp_path / "flat.npy", X.reshape(1, -1))
    assert f"float32 [1, {SIZE}] and input x is float32 [{SIZE}]" in given("flat.npy", None)[1]
    assert "Is a directory" in said("--input", f"x={tmp_path}")[1]
    assert "cannot be made" in said("--random", "--output-dir", f"{saved}/out")[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_standard_output_on_a_full_disk(service: Service, option: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "honed.tool.main", "--socket", str(service.socket), "list", *option],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("hone: ")
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


def test_big_endian_files_are_understood(hone: Hone, tmp_path: Path) -> None:
    np.save(tmp_path / "big.npy", X.astype(">f4"))
    (output,) = document(hone("infer", "small", "--input", f"x={tmp_path}/big.npy", "--json"))["outputs"]
    assert (output["min"], output["max"]) == (Y.min(), Y.max())


def test_bench(hone: Hone) -> None:
    figures = document(hone("bench", "small", "-n", "20", "--json"))
    assert figures["runs"] == 20
    assert 0 < figures["min_ms"] <= figures["median_ms"] <= figures["p95_ms"] <= figures["max_ms"]
    assert figures["std_ms"] > 0
    assert 0 < figures["device_ms"] < figures["mean_ms"]
    _, text, progress = hone("bench", "small", "-n", "3")
    assert "median" in text
    assert "95 % within" in text
    assert progress == "bench small:   0% 3 inferences\n"


def test_profile(hone: Hone) -> None:
    profile = document(hone("profile", "small", "-n", "2", "--json"))
    assert {row["name"] for row in profile["rows"]} == {"add", "increment"}
    assert profile["runs"] == 2
    _, text, _ = hone("profile", "small")
    header = next(line for line in text.splitlines() if line.startswith("kernel"))
    assert header.split() == ["kernel", "count", "us", "time", "GFLOP/s", "GB/s", "of", "peak"]
    assert "measured peaks" in text
    assert "2 launches an inference; the sum is" in text


def test_profile_writes_a_trace(hone: Hone, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    profile = document(hone("profile", "small", "--trace", str(file), "--json"))
    assert profile["runs"] == 5
    spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in spans if e["tid"] == 2] == ["add", "increment"]
    assert [e["name"] for e in spans if e["cat"] == "enqueue"] == ["enqueue add", "enqueue increment"]
    assert "timeline" not in document(hone("profile", "small", "--json"))


def test_show(hone: Hone) -> None:
    shown = document(hone("show", "small", "--json"))
    assert [kernel["name"] for kernel in shown["kernels"]] == ["add", "increment"]
    _, text, _ = hone("show", "small")
    for part in ("small (ready)", shown["sha256"], f"FP32 [{SIZE}]", "increment", "2 launches of 2 kernels"):
        assert part in text


def test_show_what_is_prepared(hone: Hone, tmp_path: Path) -> None:
    path = add_prepared(SIZE).write(tmp_path / "prepared.honed")
    assert hone("add", str(path))[0] == 0
    _, text, _ = hone("show", "prepared")
    assert "once, when it is loaded: 1 launches of 1 kernels, 4.0 KiB kept" in text
    assert "2 launches of 1 kernels" in text
    shown = document(hone("show", "prepared", "--json"))
    assert [(k["launches"], k["prepared"]) for k in shown["kernels"]] == [(2, 0), (0, 1)]
    assert shown["prepared_bytes"] == 4096
    assert hone("remove", "prepared")[0] == 0
    assert "prepared" not in hone("show", "small")[1]


def test_the_graph_is_written_to_a_file(hone: Hone, tmp_path: Path) -> None:
    file = tmp_path / "graph.dot"
    drawn = document(hone("show", "small", "--graph", "-o", str(file), "--json"))
    assert drawn["boxes"] == 4
    text = file.read_text()
    assert "2 launches of 2 kernels" in text
    assert " us of " in text
    assert "has the graph: 4 boxes" in " ".join(hone("show", "small", "--graph", "-o", str(file))[1].split())
    picture = tmp_path / "graph.svg"
    status, _, error = hone("show", "small", "--graph", "-o", str(picture))
    assert (status, picture.exists()) == ((0, True) if shutil.which("dot") else (2, False))
    assert status == 0 or "graphviz" in error


def test_a_graph_needs_a_file_that_says_how_to_draw_it(hone: Hone) -> None:
    for arguments in (("--graph",), ("--graph", "-o", "graph.html"), ("-o", "graph.dot")):
        status, _, error = hone("show", "small", *arguments)
        assert status == 2
        assert "-o" in error or ".svg" in error


def test_add_replace_and_remove(hone: Hone, small_model: Path) -> None:
    status, text, progress = hone("add", str(small_model), "--name", "second")
    assert status == 0
    assert "second is served: 2 kernels, 2 launches an inference" in text
    assert progress.startswith("add second:   0% ")
    status, _, error = hone("add", str(small_model), "--name", "second")
    assert status == 1
    assert "already" in error
    added = document(hone("add", str(small_model), "--name", "second", "--replace", "--json"))
    assert added["model_name"] == "second"
    assert document(hone("remove", "second", "--json")) == {"removed": "second"}
    for command in ("remove", "show", "profile", "bench"):
        status, out, error = hone(command, "second", "--json")
        assert status == 1
        assert json.loads(out)["error"]["code"] == "NOT_FOUND"
        assert "'second'" in error


def test_what_is_no_model_is_refused(hone: Hone, small_model: Path, tmp_path: Path) -> None:
    data = bytearray(small_model.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.honed").write_bytes(data)
    status, out, error = hone("add", str(tmp_path / "bad.honed"), "--json")
    assert status == 1
    assert json.loads(out)["error"]["code"] == "INVALID_ARGUMENT"
    assert "hone: " in error


def test_names_of_a_model_cannot_steer_the_terminal(hone: Hone, tmp_path: Path) -> None:
    b = Builder()
    x = b.input("in\x1b[2J", "float32", (4,))
    source = """__kernel void same(__global const float* a, __global float* b) {
      b[get_global_id(0)] = a[get_global_id(0)]; }"""
    b.launch(
        b.kernel(source, "same", "rw", 16, groups=4, block=1),
        x,
        b.output("../../out\x1b]0;x\x07", "float32", (4,)),
    )
    status, *_ = hone("add", str(b.write(tmp_path / "esc.honed")))
    if status != 0:
        pytest.skip("such names are refused before they get anywhere")
    folder = tmp_path / "out"
    for arguments in (
        ("show", "esc"),
        ("infer", "esc", "--random", "--output-dir", str(folder)),
        ("infer", "esc"),
    ):
        _, out, error = hone(*arguments)
        assert "\x1b" not in out + error
        assert "\x07" not in out + error
    assert [p.parent for p in tmp_path.rglob("*.npy")] == [folder]
    assert hone("remove", "esc")[0] == 0


def test_doctor_sees_the_service(hone: Hone, service: Service) -> None:
    status, out, _ = hone("doctor", "--json")
    diagnosis = json.loads(out)
    assert status == (0 if diagnosis["ok"] else 1)
    assert diagnosis["readings"]["daemon"]["state"] == "answers"
    assert diagnosis["readings"]["daemon"]["worker"] == "ready"
    assert str(service.state) in {folder["path"] for folder in diagnosis["readings"]["folders"]}
    assert any("its worker is ready on" in finding["what"] for finding in diagnosis["findings"])


def test_a_wide_and_a_narrow_terminal(service: Service) -> None:
    for columns in (40, 200):
        done = subprocess.run(
            [sys.executable, "-m", "honed.tool.main", "--socket", str(service.socket), "status"],
            env=os.environ | {"COLUMNS": str(columns)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert max(map(len, done.stdout.splitlines())) <= columns


def test_a_report_for_who_may_not_change_models_tells_the_rest(service: Service) -> None:
    with service.client() as client:
        report = gather(MayNotChange(client))
    assert [model.listed.name for model in report.models] == ["small"]
    assert report.faults.quarantined is None
    assert report.notes == (
        "what tuning recorded, and candidates in quarantine, are not told: user 9 may not call TunerRun",
    )


def test_a_report_without_the_records(service: Service) -> None:
    with service.client() as client:
        report = gather(client, records=False)
    assert report.models[0].tuned is None
    assert report.notes == ("what tuning recorded, and candidates in quarantine, are left out here",)
    assert "are left out here" in words(parsed(page(report)))


def test_faults_of_others_are_shown_and_not_blamed(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    monkeypatch.setenv("COLUMNS", "200")
    worker = client.status()["worker"]["pid"]

    def record(process: int, moment: float) -> Record:
        message = FAULT.message.replace("1693", str(process))
        return dataclasses.replace(FAULT, message=message, realtime_s=time.time(), monotonic_s=moment)

    def log(**_: object) -> Log:
        return Log([record(worker, 100.0), record(4_000_001, 200.0)])

    monkeypatch.setattr("honed.machine.kernellog.reader.open_reader", log)
    run: Callable[..., str] = lambda *words: (main(words), capsys.readouterr().out)[1]  # noqa: E731
    here = ("--state-dir", str(service.state))  # the log is read by the tool, not by the service
    listed = json.loads(run("faults", "--json", *here))["kernel_log"]["faults"]
    assert [(each["process"], each["whose"]) for each in listed] == [(worker, SERVICE), (4_000_001, OTHER)]
    text = run("faults", *here)
    assert f"process {worker}: a worker of the service" in text
    assert "process 4000001: another process, none of the service" in text
    text = run("status")
    assert "2 in the kernel log since the machine started, 1 of a worker of this service" in text
    assert client.status()["worker"]["restarts"] == 0
    metrics, status = client.ask(METRICS, MetricsParams()), client.ask(SERVER_STATUS, Nothing())
    assert ours(metrics, status).workers == {worker}
