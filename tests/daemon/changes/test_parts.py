"""Models that run in parts in a real service: the dense part on the device, the rest in the CPU engine."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.runtime import Client
from honed.runtime.compiled.model import CpuPartition, PartitionTable, PartitionTensor
from honed.runtime.errors import ModelRefused
from tests.daemon import spin
from tests.daemon.running import NO_TUNER, Service, has_ended, serving, wait_for
from tests.daemon.split_models import detector, hopeless, images, reference, sparse, two_stage
from tests.runtime.builder import Builder

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
FASTEST = '[serve]\nengine = "fastest"\n' + NO_TUNER
COMPILED = '[serve]\nengine = "gpu"\n' + NO_TUNER


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=COMPILED) as running:
        yield running


@pytest.fixture(scope="module")
def added(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = detector(tmp_path_factory.mktemp("models"))
    with service.client() as client:
        return path, client.add(path)


def check(client: Client, name: str, path: Path, image: Any) -> int:
    """Compare with ONNX Runtime; gives how many objects there are."""
    found, expected = client.infer(name, {"image": image}), reference(path, {"image": image})
    for output, value in expected.items():
        assert found[output].dtype == value.dtype
        np.testing.assert_allclose(found[output], value, rtol=1e-3, atol=1e-4, err_msg=output)
    return len(expected["found"])


def spinning(path: Path, turns: int, handed: str = "y") -> Path:
    """The model of `spin` with a last part: the elements of x whose y, called `handed`, is above 1.5."""
    nodes = [
        helper.make_node("Greater", [handed, "limit"], ["large"]),
        helper.make_node("Compress", ["x", "large"], ["kept"]),
    ]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [spin.SIZE]) for name in (handed, "x")]
    kept = helper.make_tensor_value_info("kept", TensorProto.FLOAT, ["n"])
    limit = numpy_helper.from_array(np.float32(1.5), "limit")
    graph = helper.make_graph(nodes, "part", given, [kept], initializer=[limit])
    opsets = [helper.make_opsetid("", 17)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()

    def in_parts(builder: Builder) -> None:
        builder.outputs[0] = dataclasses.replace(builder.outputs[0], name=handed)
        inputs = tuple(PartitionTensor(name=n, dtype="float32", shape=(spin.SIZE,)) for n in (handed, "x"))
        outputs = (PartitionTensor(name="kept", dtype="float32", shape=(-1,)),)
        part = CpuPartition(
            onnx=builder.constant(np.frombuffer(data, np.uint8)),
            inputs=inputs,
            outputs=outputs,
            nodes=2,
            flops=2,
            why=("chosen so",),
        )
        builder.split = PartitionTable(parts=(part,), tail=(0,), outputs=outputs, nodes=1, flops=1)

    return spin.write(path, turns, also=in_parts)


def processes(service: Service) -> list[psutil.Process]:
    """Those that run parts of models."""
    return [child for child in service.children("honed.cpu.parts") if not has_ended(child)]


def test_a_detector_is_served_in_parts_with_answers_of_any_length(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    path, told = added
    assert told["engine"] == "gpu+cpu"
    assert told["kernels"] > 0
    with service.client() as client:
        counts = {check(client, "detector", path, image) for image in images(8)}
        assert len(counts) > 2
        assert client.metadata("detector")["outputs"][0] == {
            "name": "found",
            "datatype": "FP32",
            "shape": [-1, 4],
        }


def test_it_is_told_which_parts_run_where_and_why(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    with service.client() as client:
        client.infer("detector", {"image": images(1)[0]})
        [listed] = [model for model in client.models() if model["name"] == "detector"]
        assert listed["engine"] == "gpu+cpu"
        compiled, last = client.show("detector")["parts"]
        assert (compiled["engine"], last["engine"], last["last"]) == ("gpu", "cpu", True)
        assert compiled["flops"] > 100 * last["flops"]
        assert "NonMaxSuppression" in last["why"][0]
        [figures] = [model for model in client.metrics()["models"] if model["name"] == "detector"]
        assert set(figures["engines"]) == {"gpu+cpu"}
        assert any(row["name"] == "(cpu_part)" for row in client.profile("detector", 2)["rows"])


def test_a_lost_process_of_parts_costs_no_answer(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    path, _ = added
    with service.client() as client:
        check(client, "detector", path, images(3)[2])
        [before] = processes(service)
        os.kill(before.pid, signal.SIGKILL)
        check(client, "detector", path, images(3)[2])
        [after] = processes(service)
        assert after.pid != before.pid
        assert client.status()["devices"][0]["worker"]["restarts"] >= 1


def test_a_worker_that_ends_takes_the_process_of_parts_along(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    path, _ = added
    with service.client() as client:
        check(client, "detector", path, images(3)[2])
        [before] = processes(service)
        worker = service.worker
        assert worker is not None
        worker.kill()
        check(client, "detector", path, images(3)[2])
        wait_for(lambda: has_ended(before), "the end of the process of parts", service)


def test_a_part_in_between_is_served(service: Service, tmp_path: Path) -> None:
    path = sparse(tmp_path)
    with service.client() as client:
        assert client.add(path)["engine"] == "gpu+cpu"
        _, between = client.show("sparse")["parts"]
        assert (between["last"], between["nodes"]) == (False, 5)
        assert "NonZero" in between["why"][0]
        for seed in range(3):
            x = np.random.default_rng(seed).normal(size=(1, 8, 48, 48)).astype(np.float32)
            found = client.infer("sparse", {"x": x})["answer"]
            np.testing.assert_allclose(found, reference(path, {"x": x})["answer"], rtol=1e-3, atol=1e-4)


def test_a_detector_of_two_stages_has_its_static_part_compiled(service: Service, tmp_path: Path) -> None:
    path = two_stage(tmp_path)
    with service.client() as client:
        assert client.add(path)["engine"] == "gpu+cpu"
        compiled, choosing, dense = client.show("two_stage")["parts"]
        assert compiled["nodes"] == 11
        assert "NonMaxSuppression" in choosing["why"][0]
        assert [part["sized"] for part in (choosing, dense)] == [False, True]
        assert "depends on the data" in dense["why"][-1]
        counts = set()
        for image in images(6):
            found, expected = client.infer("two_stage", {"image": image}), reference(path, {"image": image})
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
            counts.add(len(expected["boxes"]))
        assert len(counts) > 2


def test_what_is_not_worth_cutting_is_refused_with_the_reason(service: Service, tmp_path: Path) -> None:
    with service.client() as client, pytest.raises(ModelRefused) as refused:
        client.add(hopeless(tmp_path))
    assert any("not cut in parts" in reason for reason in refused.value.reasons)


@pytest.mark.slow
def test_it_is_served_at_once_and_then_by_what_is_faster(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, tmp_path: Path
) -> None:
    path = detector(tmp_path)
    with serving(tmp_path_factory, cache_dir, config=FASTEST) as running, running.client() as client:
        assert client.add(path, wait=False)["engine"] == "cpu"
        counts = {check(client, "detector", path, image) for image in images(4)}
        assert len(counts) > 1

        def compared() -> bool:
            [listed] = client.models()
            return "measured in turns" in listed["engine_why"]

        wait_for(compared, "the comparison", running, seconds=300)
        [listed] = client.models()
        assert listed["engine"] in ("cpu", "gpu+cpu")
        assert {part["engine"] for part in client.show("detector")["parts"]} == {"gpu", "cpu"}
        check(client, "detector", path, images(4)[3])


def test_it_is_served_in_parts_again_after_a_restart(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    service.kill()
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        check(client, "detector", added[0], images(4)[3])
        [listed] = [model for model in client.models() if model["name"] == "detector"]
        assert (listed["state"], listed["engine"]) == ("READY", "gpu+cpu")


def test_a_faster_compiled_part_takes_over(service: Service, tmp_path: Path) -> None:
    """What is compiled of it is exported, published and served as of any model; its parts stay."""
    with service.client() as client:
        client.add(spinning(tmp_path / "slow.honed", 400_000), name="spin")
        fast = spinning(tmp_path / "fast.honed", 40_000)
        told = client.publish("spin", fast, expected=client.show("spin")["sha256"], why="tuned: a test")
        assert told["published"], told
        assert client.history("spin")["version"] == 2
        found = client.infer("spin", {"x": spin.X})
        np.testing.assert_array_equal(found["kept"], spin.X[spin.X + 1 > 1.5])
        other = spinning(tmp_path / "other.honed", 4_000, handed="z")
        with pytest.raises(ModelRefused, match="parts are not those"):
            client.publish("spin", other, expected=client.show("spin")["sha256"], why="tuned: a test")


def chosen_and_pooled(path: Path) -> Path:
    """A backbone, and behind it a pool of what it finds good, which ONNX Runtime may pad wrongly."""
    r = np.random.default_rng(3)
    constants: dict[str, Any] = {
        "much": np.array(9, np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "least": np.array(0, np.float32),
    }
    nodes, value, channels = [], "image", 3
    for n in range(3):
        made = 16 << n
        constants[f"w{n}"] = (r.normal(size=(made, channels, 3, 3)) / np.sqrt(9 * channels)).astype(
            np.float32
        )
        nodes += [
            helper.make_node("Conv", [value, f"w{n}"], [f"c{n}"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{n}"], [f"r{n}"]),
        ]
        value, channels = f"r{n}", made
    nodes += [
        helper.make_node("ReduceMean", ["c2"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Greater", ["mean", "least"], ["good"]),
        helper.make_node("Compress", ["r2", "good"], ["kept"], axis=0),
        helper.make_node("Sub", ["kept", "much"], ["low"]),
        helper.make_node("Pad", ["low", "pads"], ["wide"]),
        helper.make_node("MaxPool", ["wide"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [8, 3, 64, 64])
    pooled = helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["n", 64, 5, 5])
    known = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [image], [pooled], known)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_part_is_optimised_no_further_than_it_answers_rightly(service: Service, tmp_path: Path) -> None:
    path = chosen_and_pooled(tmp_path / "pooled.onnx")
    image = np.random.default_rng(4).standard_normal((8, 3, 64, 64)).astype(np.float32)
    answers = []
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        answers += onnxruntime.InferenceSession(str(path), options).run(None, {"image": image})
    wrong, right = answers
    if np.abs(wrong - right).max() < 0.1:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} optimises the part rightly")
    with service.client() as client:
        client.add(path)
        assert client.show("pooled")["placement"]["engine"] == "gpu+cpu"
        np.testing.assert_allclose(client.infer("pooled", {"image": image})["pooled"], right, atol=1e-3)
        assert any("optimises the CPU engine's parts no further" in n for n in client.show("pooled")["notes"])
        client.remove("pooled")
