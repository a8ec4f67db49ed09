"""Computes regions of the graph around convolutions on tensors whose channels lie in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tvm import ir, relax, te, tirx, topi
from tvm.ir import IRModule

from honed.machine.profile import DeviceProfile

from .views import INJECTIVE, PRODUCT, Shape, bindings, extents, is_fixed, variables

# Tensors whose channels lie in blocks: a vector of them innermost, [N, C, H, W] as [N, C/c, H, W, c].
# Channelwise computations then have whole vectors, whatever the extents of an image. The last block is filled
# up with zeros, which elementwise operators keep finite, and which weights of zero keep out of sums.

Array = npt.NDArray[np.float32]


def blocks_of(channels: int, lanes: int) -> int:
    """Return how many blocks channels fill; the last block may be partly filled."""
    return -(-channels // lanes)


def blocked_shape(shape: Shape, lanes: int) -> Shape:
    """Return the shape of a blocked tensor with axes [N, C, ...]."""
    return (shape[0], blocks_of(shape[1], lanes), *shape[2:], lanes)


def block(array: Array, lanes: int, fill: float = 0.0) -> Array:
    """Return an array [N, C, ...] in blocks of channels: [N, C/lanes, ..., lanes], padded with `fill`."""
    images, channels, *rest = array.shape
    filled = np.full((images, blocks_of(channels, lanes) * lanes, *rest), fill, array.dtype)
    filled[:, :channels] = array
    parts = filled.reshape(images, -1, lanes, *rest)
    return np.ascontiguousarray(np.moveaxis(parts, 2, -1))


def blocking(plain: te.Tensor, lanes: int) -> te.Tensor:
    """Return a tensor [N, C, ...] in blocks of `lanes` channels, padded with zeros."""
    channels = int(plain.shape[1])

    def value(n: tirx.Var, outer: tirx.Var, *rest: tirx.Var) -> ir.Expr:
        channel = outer * lanes + rest[-1]
        if channels % lanes == 0:
            return plain(n, channel, *rest[:-1])
        inside = plain(n, tirx.min(channel, channels - 1), *rest[:-1])
        return tirx.Select(channel < channels, inside, tirx.const(0, plain.dtype))

    return te.compute(blocked_shape(tuple(map(int, plain.shape)), lanes), value, "block")


def unblocking(blocked: te.Tensor, channels: int) -> te.Tensor:
    """Return the tensor [N, C, ...] that a blocked tensor was made from."""
    images, _, *rest, lanes = (int(extent) for extent in blocked.shape)

    def value(n: tirx.Var, channel: tirx.Var, *at: tirx.Var) -> ir.Expr:
        return blocked(n, channel // lanes, *at, channel % lanes)

    return te.compute((images, channels, *rest), value, "unblock")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedConvolution:
    """A convolution of images by one constant, its result blocked."""

    channels: int  # Channels of the result
    depthwise: bool  # True: each channel is convolved by itself; else all with all
    blocked: bool  # The image is blocked
    window: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]  # Above, left, below, right
    lanes: int

    def weights(self, plain: Array) -> Array:
        """Return weights [O, I, H, W] as `compute` reads them, with output and input channels in blocks.

        The input channels of a depthwise convolution are dropped, and those for a plain image are not in
        blocks.
        """
        by_output: Array = block(plain[np.newaxis], self.lanes)[0]  # Shape [O/c, I, H, W, c]
        if self.depthwise:
            return np.ascontiguousarray(by_output[:, 0])
        return _inputs(by_output, self.lanes) if self.blocked else by_output

    def compute(self, image: te.Tensor, weights: te.Tensor) -> te.Tensor:
        """Compute the result [N, O/c, H, W, c] of an image [N, I/c, H, W, c], or [N, I, H, W] if plain."""
        padded = self._pad(image)
        rows, columns = (self._extent(int(image.shape[n + 2]), n) for n in range(2))
        window = [te.reduce_axis((0, extent), name) for extent, name in zip(self.window, "yx", strict=True)]
        over = list(window)
        if not self.depthwise:
            over.insert(0, te.reduce_axis((0, int(image.shape[1])), "i"))
            over += [te.reduce_axis((0, self.lanes), "k")] if self.blocked else []
        outputs = blocks_of(self.channels, self.lanes)

        def value(n: tirx.Var, o: tirx.Var, y: tirx.Var, x: tirx.Var, lane: tirx.Var) -> ir.Expr:
            at = [
                place * stride + step.var * apart
                for place, stride, step, apart in zip(
                    (y, x), self.strides, window, self.dilation, strict=True
                )
            ]
            steps = [one.var for one in over]
            channel, *inner = [o, lane] if self.depthwise else [steps[0], *steps[len(window) + 1 :]]
            return te.sum(padded(n, channel, *at, *inner) * weights(o, *steps, lane), axis=over)

        return te.compute((image.shape[0], outputs, rows, columns, self.lanes), value, "conv2d")

    def _extent(self, extent: int, axis: int) -> int:
        covered = (self.window[axis] - 1) * self.dilation[axis] + 1
        return (extent + self.padding[axis] + self.padding[axis + 2] - covered) // self.strides[axis] + 1

    def _pad(self, image: te.Tensor) -> te.Tensor:
        """Return the image with zeros around it, or the image itself where there is no padding."""
        if not any(self.padding):
            return image
        above, left, below, right = self.padding
        rows, columns = (int(extent) for extent in image.shape[2:4])

        def value(n: tirx.Var, i: tirx.Var, y: tirx.Var, x: tirx.Var, *lane: tirx.Var) -> ir.Expr:
            inside = tirx.all(y >= above, y < rows + above, x >= left, x < columns + left)
            return tirx.if_then_else(
                inside, image(n, i, y - above, x - left, *lane), tirx.const(0, image.dtype)
            )

        shape = (*image.shape[:2], rows + above + below, columns + left + right, *image.shape[4:])
        return te.compute(shape, value, "padded")


def _inputs(weights: Array, lanes: int) -> Array:
    """Return weights [O/c, I, ..., c] as [O/c, I/c, ..., c of I, c of O]."""
    found = [block(np.moveaxis(one, -1, 0), lanes) for one in weights]  # Shape [c of O, I/c, ..., c of I]
    return np.ascontiguousarray(np.stack([np.moveaxis(one, 0, -1) for one in found]))


_DTYPE = "float32"
# Includes the types of quantisation between convolutions
_TYPES = frozenset({_DTYPE, "int32", "int8", "uint8"})
_BYTES = 4
_LAYOUT = "NCHW"
_LAUNCH = 1 << 17  # Bytes that move in the time of a launch
# Operators that make no infinities from zeros, so that the padding of the last block stays finite.
_UNARY = frozenset(
    {
        *("relax.nn.relu", "relax.sigmoid", "relax.tanh", "relax.negative", "relax.abs"),
        *("relax.round", "relax.astype"),
    }
)
_BINARY = frozenset({"relax.add", "relax.subtract", "relax.multiply", "relax.maximum", "relax.minimum"})
_DIVIDE = "relax.divide"
_BOUNDS = frozenset({"relax.maximum", "relax.minimum"})  # Bounds may be infinities, too
_REDUCTIONS: Mapping[str, Callable[..., relax.Expr]] = {
    f"relax.{of.__name__}": of for of in (relax.op.mean, relax.op.sum, relax.op.max, relax.op.min)
}
_POOLS = frozenset({"relax.nn.max_pool2d", "relax.nn.avg_pool2d"})


def block_lanes(profile: DeviceProfile) -> int:
    """Return how many channels a block has on a device; 0 where blocks do not pay.

    They pay on processors, whose vectors are long (docs/dev/graph.md).
    """
    return profile.rules.max_vector_bytes // _BYTES if profile.family.blocks_of_channels else 0


def block_channels(module: IRModule, lanes: int) -> tuple[IRModule, Mapping[relax.Var, relax.Var]]:
    """Return a Relax module that computes convolutions, and their surroundings, in blocks of channels.

    Also return, by each variable of the new module, the variable of the old one whose operator's result it
    holds.
    """
    main = module["main"]
    chosen = _choose(main, lanes) if lanes else set()
    if not chosen:
        return module, {}
    others = {name: func for name, func in module.functions.items() if name.name_hint != "main"}
    writer = _Writer(relax.BlockBuilder(IRModule(others)), lanes, chosen)
    return writer.write(main), writer.origin


def _choose(main: relax.Function, lanes: int) -> set[relax.Var]:
    """Return the variables whose values are to be blocked: regions of values that can be, where that pays.

    That is where a region gains more than the moves at its borders cost.
    """
    regions: dict[relax.Var, set[relax.Var]] = {}  # By value, the values that it reads or that read it
    gained = Counter[relax.Var]()  # Bytes moved less, by values of a region
    borders: dict[relax.Var, relax.Var] = {}  # A value of a region, by the values moved at its borders
    for binding in bindings(main):
        var, call, given = binding.var, binding.value, variables(binding.value)
        convolution = able = None
        if isinstance(call, relax.Call) and _is_image(var):
            convolution = _convolution(call, regions, lanes)
            able = convolution is not None or _follows(call, regions, lanes)
        if able:
            joined = [regions[one] for one in given if one in regions]
            region = max(joined, key=len, default=set())
            for other in ({var}, *joined):
                if other is not region:
                    region |= other
                    regions |= dict.fromkeys(other, region)
        if convolution is not None:
            gained[var] += _bytes_saved(call, convolution)
            if convolution.depthwise and call.args[0] not in regions:
                borders[call.args[0]] = var
        if not able:
            borders |= {one: one for one in given if one in regions}
    borders |= {one: one for one in variables(main.body.body) if one in regions}
    for moved, at in borders.items():
        if not _lies_alike(moved, lanes):
            gained[at] -= 2 * _nbytes(moved) + _LAUNCH
    distinct = {id(region): region for region in regions.values()}.values()
    return {var for region in distinct if sum(gained[one] for one in region) > 0 for var in region}


def _bytes_saved(call: relax.Call, what: BlockedConvolution) -> int:
    """Return how many bytes less a convolution moves when its channels lie in blocks.

    No result is then separated into rows, and no blocked image is laid out, or padded, in memory.
    """
    image = _nbytes(call.args[0]) if what.depthwise or (what.blocked and any(what.padding)) else 0
    return _nbytes(call) + (2 * image + _LAUNCH if image else 0)


def _lies_alike(var: relax.Var, lanes: int) -> bool:
    """Return whether a value lies in memory as it does in blocks."""
    _, channels, *rest = extents(var)
    return math.prod(rest) == 1 and channels % lanes == 0


def _nbytes(expr: relax.Expr) -> int:
    return math.prod(extents(expr)) * np.dtype(str(expr.ty.dtype)).itemsize


def _is_image(expr: relax.Expr) -> bool:
    """Return whether a value has images and channels, of a type that is computed in lanes."""
    return is_fixed(expr) and len(extents(expr)) >= 2 and str(expr.ty.dtype) in _TYPES


def _convolution(call: relax.Call, blocked: Container[relax.Var], lanes: int) -> BlockedConvolution | None:
    """Return the convolution that a call computes, or None where it cannot be blocked by channels."""
    if str(getattr(call.op, "name", "")) != "relax.nn.conv2d":
        return None
    image, weights = call.args
    attrs = call.attrs
    known = is_fixed(image) and isinstance(weights, ir.GenericConst)
    if not known or any(str(one.ty.dtype) != _DTYPE for one in (image, weights, call)):
        return None
    if attrs.data_layout != _LAYOUT or attrs.out_layout != _LAYOUT or attrs.kernel_layout != "OIHW":
        return None
    outputs, inputs, *window = extents(weights)
    depthwise = inputs == 1 and int(attrs.groups) == outputs == extents(image)[1]
    if not depthwise and int(attrs.groups) != 1:
        return None
    above, left, below, right = (int(n) for n in attrs.padding)
    return BlockedConvolution(
        channels=outputs,
        depthwise=depthwise,
        blocked=depthwise or image in blocked,
        window=(window[0], window[1]),
        strides=(int(attrs.strides[0]), int(attrs.strides[1])),
        dilation=(int(attrs.dilation[0]), int(attrs.dilation[1])),
        padding=(above, left, below, right),
        lanes=lanes,
    )


def _follows(call: relax.Call, blocked: Container[relax.Var], lanes: int) -> bool:
    """Return whether a call can be computed on blocked tensors, and has blocked inputs."""
    name = str(getattr(call.op, "name", ""))
    if name in _BINARY or name == _DIVIDE:
        return _is_elementwise(call, blocked, divides=name == _DIVIDE)
    given = call.args[0] if call.args else None
    if name == "relax.concat" and isinstance(given, relax.Tuple):
        return _joins(call, given, blocked, lanes)
    if given is None or given not in blocked:
        return False
    before, after = extents(given), extents(call)
    if name in _UNARY:
        return True
    if str(call.ty.dtype) != _DTYPE:
        return False
    if name in _POOLS:
        return bool(call.attrs.layout == call.attrs.out_layout == _LAYOUT)
    if name in _REDUCTIONS:
        axes = call.attrs.axis
        return axes is not None and all(int(n) % len(before) >= 2 for n in axes)
    if name in ("relax.reshape", "relax.broadcast_to"):
        return before[:2] == after[:2] and (name == "relax.reshape" or len(before) == len(after))
    if name == "relax.nn.pad":
        return not any(int(n) for n in call.attrs.pad_width[:4]) and math.isfinite(call.attrs.pad_value)
    return False


def _is_elementwise(call: relax.Call, blocked: Container[relax.Var], *, divides: bool) -> bool:
    """Return whether all operands are blocked, or constants; divisors must always be constants."""
    shape = extents(call)
    values = [one for one in call.args if not isinstance(one, ir.GenericConst)]
    if not values or (divides and isinstance(call.args[0], ir.GenericConst)) or (divides and len(values) > 1):
        return False
    alike = (len(extents(one)) == len(shape) and extents(one)[:2] == shape[:2] for one in values)
    if not all(one in blocked for one in values) or not all(alike):
        return False
    bounds = str(call.op.name) in _BOUNDS
    constants = [one.value.numpy() for one in call.args if isinstance(one, ir.GenericConst)]
    return all(
        one.ndim <= len(shape) and (bounds or np.isfinite(one).all()) and not (divides and (one == 0).any())
        for one in constants
    )


def _joins(call: relax.Call, parts: relax.Tuple, blocked: Container[relax.Var], lanes: int) -> bool:
    """Return whether blocked tensors are joined, and lie one after another in blocks as they do plain."""
    axis = int(call.attrs.axis) % len(extents(call))
    if axis == 0 or any(field not in blocked for field in parts.fields):
        return False
    return axis > 1 or all(extents(field)[1] % lanes == 0 for field in parts.fields[:-1])


@dataclass()
class _Writer:
    """A writer of a new `main`.

    `plain` and `blocked` map old values to their new counterparts, as far as needed.
    """

    builder: relax.BlockBuilder
    lanes: int
    chosen: set[relax.Var]
    plain: dict[relax.Expr, relax.Expr] = field(default_factory=dict)
    blocked: dict[relax.Expr, relax.Expr] = field(default_factory=dict)
    origin: dict[relax.Var, relax.Var] = field(default_factory=dict)

    def write(self, main: relax.Function) -> IRModule:
        """Return the builder's module with the `main` that it lacks."""
        params = list(main.params)
        self.plain.update(zip(params, params, strict=True))
        with self.builder.function("main", params, attrs=dict(main.attrs or {})):
            with self.builder.dataflow():
                for binding in bindings(main):
                    self._bind(binding.var, binding.value)
                result = self.builder.emit_output(self.as_plain(main.body.body))
            self.builder.emit_func_output(result)
        return relax.transform.DeadCodeElimination()(self.builder.get())

    def as_plain(self, expr: relax.Expr) -> relax.Expr:
        """Return the unblocked counterpart of an old expression that computes nothing."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.as_plain(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.as_plain(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Var) and expr not in self.plain:
            self.plain[expr] = self._unblock(expr)
        return self.plain.get(expr, expr)

    def as_blocked(self, expr: relax.Expr) -> relax.Expr:
        """Return the blocked counterpart of an old variable."""
        if expr not in self.blocked:
            lanes = self.lanes
            made = self.builder.call_te(
                lambda plain: blocking(plain, lanes),
                self.as_plain(expr),
                primfunc_name_hint="block",
                primfunc_attrs=dict(INJECTIVE),
            )
            self.blocked[expr] = self.builder.emit(made)
        return self.blocked[expr]

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        if not isinstance(value, relax.Call):
            self.plain[var] = self.as_plain(value)
            return
        if var in self.chosen:
            made = self.builder.emit(self._compute(value))
            self.blocked[var] = made
        else:
            arguments = [self.as_plain(argument) for argument in value.args]
            made = self.builder.emit(relax.Call(value.op, arguments, value.attrs, value.ty_args))
            self.plain[var] = made
        self.origin[made] = var

    def _compute(self, call: relax.Call) -> relax.Expr:
        """Return the counterpart of a call, on blocked tensors."""
        name, lanes = str(call.op.name), self.lanes
        convolution = _convolution(call, self.chosen, lanes)
        if convolution is not None:
            return self._convolve(call, convolution)
        if name in _BINARY or name == _DIVIDE:
            fill = 1.0 if name == _DIVIDE else 0.0
            rank = len(extents(call))
            operands = [
                _constant(one, rank, lanes, fill)
                if isinstance(one, ir.GenericConst)
                else self.as_blocked(one)
                for one in call.args
            ]
            return relax.Call(call.op, operands, call.attrs)
        if name == "relax.concat":
            axis = int(call.attrs.axis) % len(extents(call))
            return relax.op.concat([self.as_blocked(one) for one in call.args[0].fields], axis=axis)
        given = self.as_blocked(call.args[0])
        if name in _UNARY:
            return relax.Call(call.op, [given], call.attrs)
        if name in _POOLS:
            return self._pool(call, given)
        if name in _REDUCTIONS:
            rank = len(extents(call.args[0]))
            axes = [int(axis) % rank for axis in call.attrs.axis]
            return _REDUCTIONS[name](given, axes, bool(call.attrs.keepdims))
        shape = blocked_shape(extents(call), lanes)
        if name == "relax.reshape":
            return relax.op.reshape(given, shape)
        if name == "relax.broadcast_to":
            return relax.op.broadcast_to(given, shape)
        widths = [*(int(n) for n in call.attrs.pad_width), 0, 0]
        return relax.op.nn.pad(given, widths, call.attrs.pad_mode, float(call.attrs.pad_value))

    def _convolve(self, call: relax.Call, what: BlockedConvolution) -> relax.Expr:
        image, weights = call.args
        given = self.as_blocked(image) if what.blocked else self.as_plain(image)
        constant = relax.const(what.weights(weights.value.numpy()))
        return self.builder.call_te(
            what.compute,
            given,
            constant,
            primfunc_name_hint="conv2d",
            primfunc_attrs=dict(PRODUCT),
        )

    def _pool(self, call: relax.Call, image: relax.Expr) -> relax.Expr:
        attrs = call.attrs
        layout = f"{_LAYOUT}{self.lanes}c"
        return self.builder.call_te(
            topi.nn.pool2d,
            image,
            kernel=[int(n) for n in attrs.pool_size],
            stride=[int(n) for n in attrs.strides],
            dilation=[int(n) for n in attrs.dilation],
            padding=[int(n) for n in attrs.padding],
            pool_type="max" if call.op.name == "relax.nn.max_pool2d" else "avg",
            ceil_mode=bool(attrs.ceil_mode),
            layout=layout,
            count_include_pad=bool(attrs.count_include_pad),
            primfunc_name_hint="pool",
        )

    def _unblock(self, var: relax.Var) -> relax.Expr:
        shape = extents(var)
        given = self.blocked[var]
        if _lies_alike(var, self.lanes):
            made = self.builder.lookup_binding(given)
            if isinstance(made, relax.Call) and str(made.op.name) == "relax.reshape":
                given = made.args[0]  # A single reshape is a view, two are a kernel
            return self.builder.emit(relax.op.reshape(given, shape))
        made = self.builder.call_te(
            lambda blocked: unblocking(blocked, shape[1]),
            given,
            primfunc_name_hint="unblock",
            primfunc_attrs=dict(INJECTIVE),
        )
        return self.builder.emit(made)


def _constant(constant: ir.GenericConst, rank: int, lanes: int, fill: float) -> relax.Expr:
    """Return the constant operand of an elementwise operator of `rank` axes.

    It is blocked where it differs by channel, and padded with `fill`.
    """
    array = constant.value.numpy()
    if array.size == 1:
        return relax.const(array.reshape(()))
    aligned = array.reshape((1,) * (rank - array.ndim) + array.shape)
    if aligned.shape[1] == 1:
        return relax.const(np.ascontiguousarray(aligned[..., np.newaxis]))
    return relax.const(block(aligned, lanes, fill))
