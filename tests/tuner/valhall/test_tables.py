"""No tile of the tables spills on the class of drivers that it is served to, by the compilers there are."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.parser
import pytest

from honed.tuner.compiler.schedules import first_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.tune.extract import extract
from honed.valhall.bench import predicted
from honed.valhall.compiler import ROOTS, OfflineCompiler
from honed.valhall.dump import kernels

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the offline compilers need root"),
]

PRODUCTS = [(192, 256, 256), (192, 512, 512), (192, 192, 64), (49, 960, 160), (128, 196, 512)]
POINTS = [
    (64, 13, 256),
    (384, 13, 48),
    (512, 13, 1000),
    (128, 55, 16),
    (32, 27, 128),
    (112, 4, 1280),
    (56, 4, 336),
    (336, 4, 112),
]  # channels, side, channels
GATED = [
    (32, 26, 32),
    (64, 26, 64),
]  # the same, times their sigmoids, which take registers for each of the sums
WINDOWS = [(32, 56, 1), (16, 104, 2)]  # channels, side, stride
SUMMED = [(48, 13, 192), (64, 56, 64), (128, 14, 128), (512, 7, 512)]  # channels, side, channels


def _models() -> list[str]:
    found = [
        f"g (float[{m},{k}] x, float[{k},{n}] w) => (float[{m},{n}] y) {{ y = MatMul(x, w) }}"
        for m, n, k in PRODUCTS
    ]
    found += [
        f"g (float[1,{given},{side},{side}] x, float[{made},{given},1,1] w)"
        f" => (float[1,{made},{side},{side}] y) {{ c = Conv(x, w) {then} }}"
        for then, points in (("y = Relu(c)", POINTS), ("s = Sigmoid(c) y = Mul(c, s)", GATED))
        for given, side, made in points
    ]
    found += [
        f"g (float[1,{channels},{side},{side}] x, float[{channels},1,3,3] w)"
        f" => (float[1,{channels},{side // stride},{side // stride}] y)"
        f" {{ y = Conv <group={channels}, pads=[1,1,1,1], strides=[{stride},{stride}]> (x, w) }}"
        for channels, side, stride in WINDOWS
    ]
    found += [
        f"g (float[1,{given},{side},{side}] x, float[{made},{given},3,3] w)"
        f" => (float[1,{made},{side},{side}] y) {{ y = Conv <pads=[1,1,1,1]> (x, w) }}"
        for given, side, made in SUMMED
    ]
    return found


@pytest.mark.parametrize(
    "mesa",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not (root / "root/server").exists(), reason=f"{root} was not built"),
        )
        for name, root in ROOTS.items()
    ],
)
def test_no_table_serves_a_tile_that_spills(mesa: str, tmp_path: Path) -> None:
    profile, sources = predicted("mali-g610", mesa), []
    for n, text in enumerate(_models()):
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        onnx.save(_with_weights(model), tmp_path / f"{n}.onnx")
        for one in extract(tmp_path / f"{n}.onnx", {}, "fp16", profile).tasks:
            origin, lowered, _ = first_kernels(one.func, "main", target_for(profile), profile)
            if origin == "tables:mali":
                sources.append((text, lowered.source))
    assert len(sources) >= len(_models()) - 2, "nearly all are served by a table"
    with OfflineCompiler(ROOTS[mesa], jobs=1) as compiler:
        begun = [(text, compiler.build(source)) for text, source in sources]
        spilling = [
            text for text, dump in begun if any(one.spills for one in kernels(dump.result()).values())
        ]
    assert spilling == []


def _with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make a constant of what is called w: its layout may be another."""
    (given,) = [value for value in model.graph.input if value.name == "w"]
    shape = [axis.dim_value for axis in given.type.tensor_type.shape.dim]
    count = 1
    for extent in shape:
        count *= extent
    values = [0.01 * (n % 7) for n in range(count)]
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, shape, values))
    model.graph.input.remove(given)
    return model
