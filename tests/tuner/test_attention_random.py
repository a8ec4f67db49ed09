"""Compiled attentions with masks, caches and lengths, and TopK, on the device against ONNX Runtime.

Each seed is a model with a few requests that its preconditions allow; `python -m tests.explore` draws others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from honed.machine.devices import Device
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import run_sets
from honed.tuner.frontend import normalise
from tests.tuner.frontend import test_attention as contrib
from tests.tuner.frontend import test_grouped_attention as grouped
from tests.tuner.frontend import test_onnx_attention as plain
from tests.tuner.frontend.test_rules import run

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]
Feed = dict[str, np.ndarray]
Drawn = tuple[onnx.ModelProto, list[Feed]]
REQUESTS = 3


def onnx_attention(rng: np.random.Generator) -> Drawn:
    batch, few, group, asking, new = (int(n) for n in rng.integers(1, 5, 5))
    past = int(rng.integers(0, 4))
    mask, causal, cap = str(rng.choice(plain.MASKS)), int(rng.integers(2)), float(rng.choice([0, 0.7]))
    filled = not past and bool(rng.integers(2))
    causal &= int(not (past and asking == 1 < new))

    def feed() -> Feed:
        made = plain.drawn(int(rng.integers(1 << 31)), batch, few, group, asking, new, past, mask, flat=False)
        if filled:
            made["filled"] = rng.integers(0, new + 1, batch)
        return made

    feeds = [feed() for _ in range(REQUESTS)]
    outputs = ["y", "new_k", "new_v"] if past else ["y"]
    return plain.model(feeds[0], outputs, 24, is_causal=causal, softcap=cap), feeds


def grouped_attention(rng: np.random.Generator) -> Drawn:
    prompt = bool(rng.integers(2))
    new = int(rng.integers(2, 6)) if prompt else 1
    batch = int(rng.integers(1, 4))
    past = int(rng.choice([0, 9])) if prompt else int(rng.integers(1, 9))
    case = grouped.Case(
        new=new,
        there=(0,) * batch,
        past=past,
        whole=new if prompt else int(rng.integers(1, past + 1)),
        run_time=bool(rng.integers(2)),
        packed=bool(rng.integers(2)),
        rotary=int(rng.choice([0, 8, 16])),
        dtype=rng.choice([np.float32, np.float16]),
    )
    window = int(rng.choice([-1, 2, 4]))
    model, feed = grouped.model(case, local_window_size=window, softcap=float(rng.choice([0, 1.5])))
    bounds = {each.input: each for each in normalise(model).preconditions}
    feeds = []
    for _ in range(REQUESTS):
        lengths = {
            n: rng.integers(b.low, b.high + 1, feed[n].shape).astype(np.int32) for n, b in bounds.items()
        }
        noise = {
            n: rng.standard_normal(v.shape).astype(v.dtype) for n, v in feed.items() if v.dtype.kind == "f"
        }
        given = feed | noise | lengths
        feeds.append({value.name: given[value.name] for value in model.graph.input})
    return model, feeds


def masked_attention(rng: np.random.Generator) -> Drawn:
    """MultiHeadAttention of ONNX Runtime's, with each form of a mask."""
    batch, asking, total = (int(n) for n in rng.integers(1, 5, 3))
    causal = bool(rng.integers(2)) and asking == total
    shape = batch, total, contrib.WIDTH
    kind = str(rng.choice(["none", "places", "pairs", "ends"]))

    def feed() -> Feed:
        made = {"q": rng.standard_normal((batch, asking, contrib.WIDTH)), "k": rng.standard_normal(shape)}
        made = {n: v.astype(np.float32) for n, v in (made | {"v": rng.standard_normal(shape)}).items()}
        mask = contrib.mask(kind, batch, asking, total, causal=causal)
        return made | ({} if mask is None else {"mask": mask})

    feeds = [feed() for _ in range(REQUESTS)]
    names = ["q", "k", "v", "", *(["mask"] if "mask" in feeds[0] else [])]
    attrs = {"num_heads": contrib.HEADS, "unidirectional": int(causal)}
    return contrib.model("MultiHeadAttention", feeds[0], names, 1, attrs), feeds


def top_k(rng: np.random.Generator) -> Drawn:
    """The best of rows, among which some are equal."""
    rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, 40))
    axis, largest = int(rng.integers(2)), int(rng.integers(2))
    most = int(rng.integers(1, (rows, columns)[axis] + 1))
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["y", "at"], axis=axis, largest=largest)],
        "best",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, columns])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("at", TensorProto.INT64, None),
        ],
        [helper.make_tensor("k", TensorProto.INT64, [1], [most])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    kinds = rng.integers(2, size=REQUESTS)
    floats = [rng.standard_normal((rows, columns)) for _ in kinds]
    equal = [rng.integers(0, 4, (rows, columns)) for _ in kinds]
    return model, [
        {"x": np.where(kind, one, other).astype(np.float32)}
        for kind, one, other in zip(kinds, floats, equal, strict=True)
    ]


KINDS: list[Callable[[np.random.Generator], Drawn]] = [
    onnx_attention,
    grouped_attention,
    masked_attention,
    top_k,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", [0])
def test_requests_that_a_compiled_form_serves_are_answered_rightly(
    kind: Callable[[np.random.Generator], Drawn], seed: int, device: Device
) -> None:
    model, feeds = kind(np.random.default_rng(seed))
    names = [output.name for output in model.graph.output]
    for feed, found in zip(feeds, run_sets(model, feeds, device, "auto", untuned_kernels), strict=True):
        expected = run(model, feed)
        tolerance = 1e-4 if all(value.dtype != np.float16 for value in feed.values()) else 2e-2
        for name, wanted in zip(names, expected, strict=True):
            assert found[name].shape == wanted.shape
            np.testing.assert_allclose(found[name], wanted, rtol=tolerance, atol=tolerance)
