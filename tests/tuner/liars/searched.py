"""Candidates as the search makes them, of functions of every kind a model has.

References come from TVM's CPU code of the unscheduled function.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import te, tirx, topi

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate
from honed.tuner.search.batches import Evolution
from honed.tuner.search.costmodel import WIDTH, CostModel
from honed.tuner.search.rules import postprocs, space


def _tensor(*shape: int) -> te.Tensor:
    return te.placeholder(shape, name="p")


def _swish(x: te.Tensor) -> te.Tensor:
    return topi.multiply(x, topi.sigmoid(x))


def _layer_norm(x: te.Tensor, scale: te.Tensor, shift: te.Tensor) -> te.Tensor:
    centred = topi.subtract(x, topi.divide(topi.sum(x, -1, True), float(int(x.shape[-1]))))
    variance = topi.divide(topi.sum(topi.multiply(centred, centred), -1, True), float(int(x.shape[-1])))
    normal = topi.divide(centred, topi.sqrt(topi.add(variance, 1e-5)))
    return topi.add(topi.multiply(normal, scale), shift)


def _product(*given: te.Tensor) -> te.Tensor:
    return topi.sum(topi.multiply(*given))


def pointwise_convolution() -> tirx.PrimFunc:
    """Case 2: 1x1, 348 to 2084 channels, 12x12, bias, x sigmoid(x)."""
    x, w, bias = _tensor(1, 348, 12, 12), _tensor(2084, 348, 1, 1), _tensor(1, 2084, 1, 1)
    return te.create_prim_func([x, w, bias, _swish(topi.add(topi.nn.conv2d(x, w, 1, 0, 1), bias))])


def product_of_two() -> tirx.PrimFunc:
    """Case 4: the sum of the products of two vectors of two elements."""
    x, y = _tensor(2), _tensor(2)
    return te.create_prim_func([x, y, _product(x, y)])


def functions() -> dict[str, tirx.PrimFunc]:
    """By name; each has one output, its last parameter."""
    a, b, bias = _tensor(192, 256), _tensor(256, 256), _tensor(256)
    q, k = _tensor(4, 96, 64), _tensor(4, 96, 64)
    x, w = _tensor(1, 32, 28, 28), _tensor(48, 32, 3, 3)
    deep = _tensor(32, 1, 3, 3)
    rows, scale, shift = _tensor(192, 256), _tensor(256), _tensor(256)
    odd, more = _tensor(33, 65), _tensor(65, 17)
    long = _tensor(3, 10_000)
    grid = _tensor(8, 64, 96)
    made = {
        "dense": [a, b, topi.nn.dense(a, b)],
        "dense-bias-relu": [a, b, bias, topi.nn.relu(topi.add(topi.matmul(a, b), bias))],
        "dense-odd": [odd, more, topi.matmul(odd, more)],
        "batched": [q, k, topi.nn.batch_matmul(q, k)],
        "convolution": [x, w, topi.nn.conv2d(x, w, 1, 1, 1)],
        "convolution-stride": [x, w, topi.nn.relu(topi.nn.conv2d(x, w, 2, 1, 1))],
        "depthwise": [x, deep, topi.nn.depthwise_conv2d_nchw(x, deep, 1, 1, 1)],
        "softmax": [rows, topi.nn.softmax(rows)],
        "layer-norm": [rows, scale, shift, _layer_norm(rows, scale, shift)],
        "sum": [long, topi.sum(long, 1)],
        "max": [rows, topi.max(rows, 0)],
        "pool": [x, topi.nn.pool2d(x, [2, 2], [2, 2], [1, 1], [0, 0, 0, 0], "max")],
        "elementwise": [rows, topi.add(topi.exp(topi.negative(rows)), _swish(rows))],
        "transpose": [grid, topi.transpose(grid, [2, 0, 1])],
        "concatenate": [q, k, topi.concatenate([q, k], 2)],
    }
    found = {name: te.create_prim_func(tensors) for name, tensors in made.items()}
    return found | {"case 2": pointwise_convolution(), "case 4": product_of_two()}


def candidates(func: tirx.PrimFunc, profile: DeviceProfile, count: int, seed: int) -> Iterator[Candidate]:
    """About `count` of the search, in batches as it proposes them, less those that lowering refuses."""
    target, func = target_for(profile), narrow_indices(func)
    evolution = Evolution(
        func,
        target,
        space(func, target, profile),
        CostModel(WIDTH),
        batch=min(count, 64),
        seed=seed,
        postprocs=postprocs(profile),
    )
    while count > 0:
        proposals = evolution.propose()
        if not proposals:
            return
        count -= len(proposals)
        for proposal in proposals:
            try:
                lowered = lower_function(proposal.scheduled, "main", target, profile)
            except LoweringFailed:
                continue
            yield Candidate.of(proposal.id, lowered)
