"""Requests with values that a compiled form does not serve, through the real service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.runtime.errors import HonedError, PreconditionBroken
from tests.daemon.changes.test_engines import engine
from tests.daemon.conftest import Hone
from tests.daemon.running import NO_TUNER, Service, serving, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
FASTEST = '[serve]\nengine = "fastest"\n' + NO_TUNER
BATCH, HEADS, SIZE, PAST = 2, 2, 8, 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=FASTEST) as running:
        yield running


def cache(folder: Path) -> Path:
    """GroupQueryAttention over a cache whose length an input decides, as exporters write it."""
    new, old = [BATCH, "s", HEADS * SIZE], [BATCH, HEADS, "p", SIZE]
    kinds = {"q": new, "k": new, "v": new, "past_k": old, "past_v": old}
    node = helper.make_node(
        "GroupQueryAttention",
        [*kinds, "ends", "total"],
        ["y", "new_k", "new_v"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=HEADS,
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in kinds.items()]
    inputs.append(helper.make_tensor_value_info("ends", TensorProto.INT32, [BATCH]))
    inputs.append(helper.make_tensor_value_info("total", TensorProto.INT32, []))
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "new_k", "new_v")
    ]
    graph = helper.make_graph([node], "cache", inputs, outputs)
    return saved(graph, folder / "cache.onnx")


def table(folder: Path) -> Path:
    """Rows of a table, for numbers of tokens."""
    rows = np.random.default_rng(1).standard_normal((10, 16)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", "tokens"], ["x"]), helper.make_node("Relu", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "table",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 16])],
        [numpy_helper.from_array(rows, "table")],
    )
    return saved(graph, folder / "table.onnx")


def saved(graph: onnx.GraphProto, path: Path) -> Path:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def step(there: tuple[int, ...], total: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {n: rng.standard_normal((BATCH, 1, HEADS * SIZE)).astype(np.float32) for n in "qkv"}
    made |= {f"past_{n}": rng.standard_normal((BATCH, HEADS, PAST, SIZE)).astype(np.float32) for n in "kv"}
    return made | {"ends": np.array(there, np.int32), "total": np.array(total, np.int32)}


def test_a_cache_that_grows_beyond_what_was_compiled_is_answered_rightly(
    service: Service, tmp_path: Path, typed: Hone
) -> None:
    path = cache(tmp_path)
    session = onnxruntime.InferenceSession(str(path))
    with service.client() as client:
        shapes = {name: value.shape for name, value in step((0, 0), 1, 0).items() if value.ndim}
        client.add(path, shapes=shapes)
        client.pin("cache", engine="gpu")
        wait_for(lambda: engine(client, "cache") == "gpu", "the device to have loaded it", service)

        def engines(there: tuple[int, ...], total: int) -> dict[str, int]:
            before = figures(service, "cache")
            given = step(there, total, total)
            expected = dict(zip(("y", "new_k", "new_v"), session.run(None, given), strict=True))
            for name, value in client.infer("cache", given).items():
                assert value.shape == expected[name].shape
                np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)
            after = figures(service, "cache")
            return {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}

        assert engines((5, 3), 6) == {"gpu": 1}
        assert engines((0, 1), 4) == {"gpu": 1}
        assert engines((0, 0), 1) == {"gpu": 1}, "a prompt of one token"
        assert engines((6, 2), 7) == {"cpu": 1}, "the cache grows by a row"
        assert engines((6, 6), 7) == {"cpu": 1}
        assert engines((2, 4), 5) == {"gpu": 1}
        shown = client.show("cache")
        assert any("'total' holds 1 to 6" in each for each in shown["preconditions"])
        assert shown["broke_preconditions"] == 2
        status, said, _ = typed("--socket", str(service.socket), "show", "cache")
        assert status == 0
        assert "holds 1 to 6" in " ".join(said.split())
        assert "2 with other values, since the service started" in " ".join(said.split())
        with pytest.raises(HonedError, match="seqlens_k"):  # as ONNX Runtime says
            client.infer("cache", step((6, 6), 6, 1))


def test_of_requests_that_run_as_one_only_that_with_other_values_is_refused(
    service: Service, tmp_path: Path
) -> None:
    path = table(tmp_path)
    with service.client() as client:
        client.add(path, shapes={"tokens": (2, 3)})
        client.pin("table", engine="gpu")
        wait_for(lambda: engine(client, "table") == "gpu", "the device to have loaded it", service)
        client.set("table", max_batch=2, batch_delay_us=10_000_000)
        given = [np.array([[0, 5, 9]]), np.array([[0, 5, 10]])]

        def infer(tokens: np.ndarray) -> np.ndarray | HonedError:
            with service.client() as own:
                try:
                    return own.infer("table", {"tokens": tokens})["y"]
                except HonedError as error:
                    return error

        with ThreadPoolExecutor(2) as pool:
            right, wrong = pool.map(infer, given)
        assert isinstance(right, np.ndarray)
        [expected] = onnxruntime.InferenceSession(str(path)).run(None, {"tokens": given[0]})
        np.testing.assert_allclose(right, expected)
        assert "out of data bounds" in str(wrong)


def test_a_model_that_onnx_runtime_shall_not_run_says_what_it_serves(
    service: Service, tmp_path: Path
) -> None:
    with service.client() as client:
        client.add(table(tmp_path), name="alone", shapes={"tokens": (1, 3)}, engine="gpu")
        assert client.infer("alone", {"tokens": np.array([[0, 5, -10]])})["y"].shape == (1, 3, 16)
        with pytest.raises(PreconditionBroken, match=r"'tokens' holds -10 to 9 .* has 0 to 10"):
            client.infer("alone", {"tokens": np.array([[0, 5, 10]])})


def figures(service: Service, model: str) -> dict[str, int]:
    """How many requests each kind of engine has answered."""
    with service.client() as client:
        return next(each["engines"] for each in client.metrics()["models"] if each["name"] == model)
