"""What becomes of convolutions on a device, where it is other than what TVM makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from tvm import ir, relax, topi

from honed.machine.families import DeviceFamily
from honed.machine.profile import DeviceProfile

from . import winograd

Legalise = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
_VECTOR = 4  # output channels that odd numbers of them are rounded up to
_INJECTIVE = 2  # TVM's pattern of what moves elements, which is not fused with a convolution before it
_LEAST_OUTPUTS = 5  # below, rounding up adds more than vectors save


def legalisations(profile: DeviceProfile) -> Mapping[str, Legalise]:
    """By operator, for the device."""
    return {"relax.nn.conv2d": partial(_convolved, profile.family)}


def _convolved(family: DeviceFamily, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    what = winograd.suited(call) if family.winograd else None
    if what is not None:
        return winograd.convolved(builder, call, what)
    plain: Legalise = ir.Op.get("relax.nn.conv2d").get_attr("FLegalize")
    if not (family.vectors_of_channels and _is_odd(call)):
        return plain(builder, call)
    image, weights = call.args
    given = weights.value.numpy()
    outputs = len(given)
    more = relax.const(np.pad(given, [(0, -outputs % _VECTOR), *[(0, 0)] * (given.ndim - 1)]))
    rounded = builder.normalize(relax.Call(call.op, [image, more], call.attrs))
    made = builder.emit(plain(builder, rounded))
    ends = [int(extent) for extent in call.ty.shape]
    return builder.call_te(
        topi.strided_slice,
        made,
        begin=[0] * len(ends),
        end=ends,
        primfunc_name_hint="without_rounding",
        primfunc_attrs={"op_pattern": _INJECTIVE},
    )


def _is_odd(call: relax.Call) -> bool:
    """Whether it has a window, and constant weights for output channels that no vector divides."""
    attrs, weights = call.attrs, call.args[1]
    if attrs.groups != 1 or attrs.kernel_layout != "OIHW" or attrs.out_layout != "NCHW":
        return False
    if not isinstance(weights, ir.GenericConst):
        return False
    outputs, _, *window = (int(extent) for extent in weights.ty.shape)
    return outputs % 2 == 1 and outputs >= _LEAST_OUTPUTS and math.prod(window) > 1
