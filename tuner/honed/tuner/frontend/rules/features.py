"""What classic machine learning (ai.onnx.ml) does to its inputs."""

from __future__ import annotations

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import Call, rule
from honed.tuner.frontend.values import Value, elem_type

from .layout import reshape

DOMAIN = "ai.onnx.ml"


@rule("Binarizer", domain=DOMAIN)
def binarizer(b: Builder, c: Call) -> Value:
    """1 above the threshold, else 0."""
    x = c.x()
    return b("Cast", b("Less", b.like(c.number("threshold", 0.0), x), x), to=elem_type(x.dtype))


@rule("ArrayFeatureExtractor", domain=DOMAIN)
def extract(b: Builder, c: Call) -> Value:
    """Elements along the last axis, by indices."""
    x, places = c.x(0), c.x(1)
    found = b("Gather", x, reshape(b, places, [places.size]), axis=x.rank - 1)
    return reshape(b, found, [1, *found.shape]) if x.rank == 1 else found
