"""Which Mali a reported name means."""

from __future__ import annotations

import pytest

from honed.machine.families import MALI_MODELS, family_of, mali_model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Mali-G610 r0p0", "Mali-G610"),
        ("Mali-LODX r0p0", "Mali-G610"),
        ("Mali-G610 MC4 (Panfrost)", "Mali-G610"),
        ("Mali-G610 (Panfrost)", "Mali-G610"),
        ("MALI-G610", "Mali-G610"),
        ("ARM Mali-G610", "Mali-G610"),
        ("Mali-G52", "Mali-G52"),
        ("Mali-G52 r1 MC1 (Panfrost)", "Mali-G52"),
        ("Mali-G310v2 MC1 (Panfrost)", "Mali-G310"),
        ("Mali-TTRX r1p1", "Mali-G77"),
        ("Mali-G710 MC10", "Mali-G710"),
        ("Mali-G71 r0p0", None),
        ("Mali-G6100", None),
        ("Mali-T860 (Panfrost)", None),
        ("Mali-TTIX r0p0", None),
        ("Immortalis-G715", None),
        ("NVIDIA H100", None),
        ("Logitech G610", None),
        ("", None),
    ],
)
def test_models(name: str, model: str | None) -> None:
    found = mali_model(name)
    assert (found and found.name) == model


def test_a_mali_that_is_not_in_the_table_is_one() -> None:
    for name in ("Mali-G6100", "Mali-TTIX r0p0", "Immortalis-G715", "mali"):
        assert family_of(name, is_cpu=False).name == "mali"


def test_the_table() -> None:
    names = [name for model in MALI_MODELS for name in (model.name, model.code)]
    assert len(set(names)) == len(names)
    wanted = {f"Mali-G{number}" for number in (52, 57, 68, 76, 77, 78, 310, 510, 610, 710)}
    assert {model.name for model in MALI_MODELS} == wanted
    for model in MALI_MODELS:
        assert mali_model(f"{model.name} r0p0") is model
        assert mali_model(f"Mali-{model.code} r0p0") is model
        assert model.fma_fp16 == 2 * model.fma_fp32


def test_what_a_chip_can_do_at_most() -> None:
    """RK3588's four cores do 512 and 1,024 GFLOP/s at their 1 GHz; the bound allows for faster clocks."""
    model = mali_model("Mali-LODX r0p0")
    assert model is not None
    assert 512 < model.most_gflops(4, half=False) == pytest.approx(768)
    assert 1024 < model.most_gflops(4, half=True) == pytest.approx(1536)
