"""The matrix product written by hand, run with floats in the place of halves, which few devices here have."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from benchmarks.valhall.hand import Product, product

from honed.machine.devices import Device


@pytest.mark.parametrize("what", [Product(2, 64, 128, 32, True), Product(3, 32, 192, 16, False)], ids=str)
def test_the_product_by_hand_is_one(device: Device, what: Product) -> None:
    source, launch = product(what)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((what.batch, what.m, what.k), np.float32)
    b = rng.standard_normal((1 if what.shared else what.batch, what.k, what.n), np.float32)
    assert launch.bytes == a.nbytes // 2 + b.nbytes // 2 + 2 * what.batch * what.m * what.n
    found = np.full((what.batch, what.m, what.n), np.nan, np.float32)
    context = cl.Context([device.cl])
    queue = cl.CommandQueue(context)
    buffers = [cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=x) for x in (a, b, found)]
    program = cl.Program(context, source.replace("half", "float").replace("#pragma", "//")).build()
    sizes = [groups * items for groups, items in zip(launch.grid, launch.block, strict=True)]
    program.hand(queue, sizes, launch.block, *buffers)
    cl.enqueue_copy(queue, found, buffers[-1]).wait()
    np.testing.assert_allclose(found, a @ b, atol=1e-4)
