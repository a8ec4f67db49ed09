"""Bounds of Winograd's convolutions."""

from __future__ import annotations

import pytest
from benchmarks.valhall.winograd import Layer, bounds, layers

from honed.valhall.judge import BANDWIDTH, FP16_FLOPS


def test_a_layer_of_many_channels_is_bound_by_the_product() -> None:
    """16 products of 256 x 256 x 49, and transformed images and sums of 16 x 256 x 49 halves."""
    found = bounds(Layer("", 256, 256, 14, 14), 2, "fp16")
    product = 2 * 16 * 256 * 256 * 49 / (0.66 * FP16_FLOPS)
    transforms = 2 * 2 * (256 * 14 * 14 + 16 * 256 * 49) / BANDWIDTH
    assert found.launches == pytest.approx(product + transforms + 12e-6)
    assert found.fused < found.launches


def test_a_layer_of_few_tiles_is_bound_by_its_weights() -> None:
    found = bounds(Layer("", 512, 512, 7, 7), 4, "fp16")
    assert found.fused == pytest.approx(2 * (36 * 512 * 512 + 2 * 512 * 7 * 7) / BANDWIDTH + 4e-6)


def test_layers_are_those_with_windows_of_3x3_and_a_step_of_one() -> None:
    found = list(layers())
    assert Layer("squeezenet_fp16", 64, 256, 13, 13) in found
    assert Layer("super_resolution", 64, 64, 224, 224) in found
    assert len(found) == len(set(found)) == 12
