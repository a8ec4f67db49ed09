"""The models that are tuned, each with another size of it whose records are kin of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from honed.tuner.demo import lightglue

_MOBILENET = Path(__file__).parents[2] / "tests/models/mobilenet_v2_035_128.onnx"


@dataclass(frozen=True, slots=True)
class Model:
    """A network for `size` keypoints or pixels, and the size that was tuned before it."""

    network: Literal["lightglue", "mobilenet"]
    size: int
    kin: int

    def write(self, folder: Path, size: int) -> Path:
        """The ONNX file of one of the sizes."""
        path = folder / f"{self.network}-{size}.onnx"
        if self.network == "lightglue":
            return lightglue.write(path, size)
        model = onnx.load(_MOBILENET)
        for extent in model.graph.input[0].type.tensor_type.shape.dim[2:]:
            extent.dim_value = size
        del model.graph.value_info[:]  # the shapes of the size it was made for
        onnx.save(model, path)
        return path


MODELS = (Model("lightglue", 192, 64), Model("mobilenet", 128, 160))
