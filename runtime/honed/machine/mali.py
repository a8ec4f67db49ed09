"""Arm's Mali GPUs, as data: which one a device's reported name means, and what its shader core can do.

One GPU goes by several names: Arm's driver reports `Mali-G610 r0p0` or, where it does not know the product by
its name, the internal one (`Mali-LODX r0p0`); Mesa reports `Mali-G610 MC4 (Panfrost)`. All are one model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Above every clock these GPUs were sold with; the fastest known is 1.3 GHz (G610, Dimensity 7350).
FASTEST_HZ = 1.5e9


@dataclass(frozen=True, slots=True)
class Model:
    """One model of GPU. Multiply-adds are of the widest shader core that it is sold with.

    Sources: `products` and `codes`, kbase's `mali_kbase_gpu_id.h` (GPU_ID_PRODUCT_*), (9, 3) Mesa's
    `pan_model.c`. `warp`, and `fma_fp32` and `fma_fp16` up to the G78: *Arm Mali GPU Datasheet* of 2021 (half
    of its operations per clock). Later `fma_fp32`: Mesa's `pan_model.c` (G310, G610) and AnandTech of
    25 May 2021 (G510, G710); their `fma_fp16` is twice that, as clpeak shows on a G610.
    """

    name: str
    codes: tuple[str, ...]  # internal names, as drivers report them
    products: tuple[tuple[int, int], ...]  # GPU_ID's architecture (bits 28 to 31), product (16 to 19)
    architecture: Literal["Bifrost", "Valhall"]
    generation: int  # of the architecture, as Arm counts
    warp: int  # work-items that run in step
    fma_fp32: int  # multiply-adds a core does in one clock
    fma_fp16: int

    def most_gflops(self, cores: int, *, half: bool) -> float:
        """GFLOP/s that no chip with so many cores of this model reaches, at half or single precision."""
        return 2e-9 * cores * (self.fma_fp16 if half else self.fma_fp32) * FASTEST_HZ


# fmt: off
MODELS = (  # name, codes, products, architecture, generation, warp, fma_fp32, fma_fp16
    Model("Mali-G52", ("TGOX",), ((7, 2),), "Bifrost", 2, 8, 24, 48),  # fp32: 16 with two execution engines
    Model("Mali-G76", ("TNOX",), ((7, 1),), "Bifrost", 3, 8, 24, 48),
    Model("Mali-G57", ("TNAX",), ((9, 1), (9, 3)), "Valhall", 1, 16, 32, 64),
    Model("Mali-G77", ("TTRX",), ((9, 0),), "Valhall", 1, 16, 32, 64),
    Model("Mali-G68", ("LBEX",), ((9, 4),), "Valhall", 2, 16, 32, 64),
    Model("Mali-G78", ("TBEX",), ((9, 2),), "Valhall", 2, 16, 32, 64),
    Model("Mali-G310", ("TVAX",), ((10, 4),), "Valhall", 3, 16, 64, 128),  # fp32: 16 to 64, in five variants
    Model("Mali-G510", ("TGRX",), ((10, 3),), "Valhall", 3, 16, 64, 128),  # fp32: 48 with one narrower engine
    Model("Mali-G610", ("LODX",), ((10, 7),), "Valhall", 3, 16, 64, 128),
    Model("Mali-G710", ("TODX",), ((10, 2),), "Valhall", 3, 16, 64, 128),
)
# fmt: on
# Mesa appends a variant to a product ("G310v2") and Arm a revision or a core count, after a space.
_NAME = re.compile(r"\bmali-([a-z]+\d*)(?:v\d+)?\b")
_BY_NAME = {name: model for model in MODELS for name in (model.name.removeprefix("Mali-"), *model.codes)}


def model_of(name: str) -> Model | None:
    """The model that a device's reported name means; None for one that is not in the table, or no Mali."""
    found = _NAME.search(name.casefold())
    return _BY_NAME.get(found[1].upper()) if found else None
