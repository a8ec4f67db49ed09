"""Finds the lines of memory that a warp touches, by a kernel's address arithmetic for all lanes of a group.

A dump has the code that the machine code was made from, NIR, in SSA form. Its integers are computed in order,
one value for each lane of the group in the middle of the launch, in the first turn of each loop. Arguments
are assumed to be 0: buffers are aligned to more than a line. Values that depend on memory or floats are
unknown.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CORES = 4
WARP = 16
LINE = 64  # Bytes

_Lanes = npt.NDArray[np.uint64]
_Value = list[_Lanes] | None  # List of components, None if unknown

_BLOCK = re.compile(r"block b(\d+):")
_STATEMENT = re.compile(r"(?:(?:con |div )?\s*(\d+)(?:x(\d+))?\s+(%\d+) = )?(@?\w+)[^ ]* ?(.*)")
_OPERAND = re.compile(r"(%\d+)(?:\.([a-p]+|[xyzw]+))?")
_NUMBER = re.compile(r"0x[0-9a-f]+|\btrue\b|\bfalse\b")
_SHOWN = re.compile(r"\((0x[0-9a-f]+)\)")  # A constant operand's value
_ACCESS = re.compile(r"@(?:(?:load|store)_(?:global|global_constant|shared)|(?:global|shared)_atomic\w*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchGeometry:
    """A launch: work-groups and work-items of a group."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def warps(self) -> int:
        """Warps that the busiest core runs; groups are assigned whole, and partial warps cost as whole."""
        return math.ceil(math.prod(self.grid) / CORES) * math.ceil(math.prod(self.block) / WARP)


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store of `bits` a lane, and the lines that a warp of the group touches on average."""

    bits: int
    lines: float


def accesses(nir: Sequence[str], geometry: LaunchGeometry) -> dict[int, list[Access]]:
    """Return the loads and stores of known addresses in each basic block, by its number."""
    found: dict[int, list[Access]] = {}
    values: dict[str, _Value] = {}
    types: dict[str, tuple[int, int]] = {}  # Bits of a component, and number of components
    group = _WorkGroup(geometry)
    block = 0
    for line in nir:
        text = line.partition("//")[0].strip()
        if (match := _BLOCK.match(text)) is not None:
            block = int(match.group(1))
        elif (match := _STATEMENT.match(text)) is not None:
            bits, components, name, operation, rest = match.groups()
            if name is not None:
                types[name] = int(bits), int(components or 1)
                first = _OPERAND.search(rest)
                source, _ = types.get(first.group(1), types[name]) if first is not None else types[name]
                values[name] = group.value(operation, rest, source, *types[name], values)
            if _ACCESS.match(operation):
                operands = [one.group(1) for one in _OPERAND.finditer(rest)]
                moved, address = (operands[0], operands[1]) if "store" in operation else (name, operands[0])
                where = values.get(address)
                if where is not None:
                    size = math.prod(types[moved])
                    found.setdefault(block, []).append(Access(size, group.lines(where[0], size // 8)))
    return found


_OFFSETS = range(-(1 << 15), 1 << 15)  # Bytes that an instruction can add to an address by itself
# Number of instructions that add a constant to an address: in Mesa 26, which adds 64 bits, and in Mesa 25.
_ADDED, _ADDED_BY_WORDS = 4, 3


def constant_offsets(nir: Sequence[str]) -> dict[int, int]:
    """Return, by basic block, the number of instructions that add what loads and stores could add themselves.

    Loads and stores have an offset of 16 bits, which Mesa leaves at 0. Only sums that nothing else reads
    count.
    """
    made: dict[str, tuple[int, str, str]] = {}  # Block, operation and operands, by the value that they define
    readers: dict[str, set[str]] = {}  # Operations, by the value that they read
    addresses = set[str]()
    block = 0
    for line in nir:
        text = line.partition("//")[0].strip()
        if (match := _BLOCK.match(text)) is not None:
            block = int(match.group(1))
        elif (match := _STATEMENT.match(text)) is not None:
            _, _, name, operation, rest = match.groups()
            operands = [one.group(1) for one in _OPERAND.finditer(rest)]
            if name is not None:
                made[name] = block, operation, rest
            for one in operands:
                readers.setdefault(one, set()).add(operation)
            if _ACCESS.match(operation):
                addresses.add(operands["store" in operation])
    found: dict[int, int] = {}
    for address in addresses:
        block, operation, rest = made.get(address, (0, "", ""))
        cost, alone = _ADDED, readers[address]
        if operation == "pack_64_2x32_split":
            low = _OPERAND.findall(rest)[0][0]
            alone = alone | readers[low] - {operation, "ult32"}
            _, operation, rest = made.get(low, (0, "", ""))
            cost = _ADDED_BY_WORDS
        shown = _SHOWN.findall(rest)
        if operation == "iadd" and len(shown) == 1 and all(map(_ACCESS.match, alone)):
            width = 64 if cost == _ADDED else 32
            if int(_as_signed(np.array([int(shown[0], 0)], np.uint64), width)[0]) in _OFFSETS:
                found[block] = found.get(block, 0) + cost
    return found


class _WorkGroup:
    """The lanes of a work-group in the middle of a launch."""

    def __init__(self, geometry: LaunchGeometry) -> None:
        count = math.prod(geometry.block)
        index = np.arange(count, dtype=np.uint64)
        x, y, _ = (np.uint64(n) for n in geometry.block)
        local = [index % x, index // x % y, index // (x * y)]
        middle = [np.full(count, n // 2, np.uint64) for n in geometry.grid]
        self._warps = np.tile(index // np.uint64(WARP), 2)  # At most 64: `lines` has 8 bits for them
        self._zero = np.zeros(count, np.uint64)
        self._known: Mapping[str, list[_Lanes]] = {
            "@load_local_invocation_id": local,
            "@load_local_invocation_index": [index],
            "@load_subgroup_invocation": [index % np.uint64(WARP)],
            "@load_workgroup_id": middle,
            "@load_global_invocation_id": [
                i * np.uint64(n) + j for i, n, j in zip(middle, geometry.block, local, strict=True)
            ],
            "@load_workgroup_size": [np.full(count, n, np.uint64) for n in geometry.block],
            "@load_num_workgroups": [np.full(count, n, np.uint64) for n in geometry.grid],
        }

    def lines(self, address: _Lanes, nbytes: int) -> float:
        ends = np.concatenate((address, address + np.uint64(nbytes - 1)))
        touched = np.unique((ends // np.uint64(LINE)) << np.uint64(8) | self._warps)
        return len(touched) / (int(self._warps[-1]) + 1)

    def value(
        self,
        operation: str,
        rest: str,
        source: int,
        bits: int,
        components: int,
        values: Mapping[str, _Value],
    ) -> _Value:
        """Return the value of `bits` that a statement defines, from a first operand of `source` bits.

        None if it is unknown.
        """
        if operation == "load_const":
            numbers = _NUMBER.findall(rest.partition(" = (")[0])
            return [self._zero + np.uint64(_number(one)) for one in numbers]
        if operation == "@load_ubo" or operation.startswith("@load_base_"):
            return [self._zero] * components
        if operation in self._known:
            return [_mask(one, bits) for one in self._known[operation][:components]]
        operands = _operands(rest, values)
        if operation == "phi":
            return next((one for one in operands if one is not None), None)
        if any(one is None for one in operands):
            return None
        return _compute(operation, [one for one in operands if one is not None], source, bits, components)


def _operands(rest: str, values: Mapping[str, _Value]) -> list[_Value]:
    found: list[_Value] = []
    for match in _OPERAND.finditer(rest):
        value, swizzle = values.get(match.group(1)), match.group(2)
        if value is not None and swizzle:
            letters = "xyzw" if set(swizzle) <= set("xyzw") else "abcdefghijklmnop"
            places = [letters.index(letter) for letter in swizzle]
            value = [value[n] for n in places] if max(places) < len(value) else None
        found.append(value)
    return found


def _number(text: str) -> int:
    return {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text, 0)


def _mask(value: _Lanes, bits: int) -> _Lanes:
    return value & np.uint64((1 << bits) - 1)


def _as_signed(value: _Lanes, bits: int) -> npt.NDArray[np.int64]:
    left = np.uint64(64 - bits)
    return (value << left).view(np.int64) >> np.int64(64 - bits)


_ARITHMETIC: Mapping[str, Callable[[_Lanes, _Lanes], _Lanes]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "iand": operator.and_,
    "ior": operator.or_,
    "ixor": operator.xor,
    "umin": np.minimum,
    "umax": np.maximum,
}
_SIGNED: Mapping[str, Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.int64]]] = {
    "imin": np.minimum,
    "imax": np.maximum,
    "iabs": lambda a, _: np.abs(a),
}
_SHIFTS: Mapping[str, Callable[[_Lanes, _Lanes, int], _Lanes]] = {
    "ishl": lambda a, by, _: a << by,
    "ushr": lambda a, by, _: a >> by,
    "ishr": lambda a, by, bits: (_as_signed(a, bits) >> by.view(np.int64)).view(np.uint64),
}
_UNARY: Mapping[str, Callable[[_Lanes], _Lanes]] = {
    "inot": operator.invert,
    "ineg": lambda a: np.uint64(0) - a,
    "mov": lambda a: a,
    "unpack_64_2x32_split_x": lambda a: a,
    "unpack_64_2x32_split_y": lambda a: a >> np.uint64(32),
}
_COMPARED = {"lt": operator.lt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne}
_COMPARISON = re.compile(r"([iu])(lt|ge|eq|ne)(?:\d+|_pan)?$")
_PARTS = re.compile(r"(extract|insert)_([iu])(8|16)$")


def _compute(operation: str, operands: list[list[_Lanes]], source: int, bits: int, components: int) -> _Value:
    """Return the result of an operation on integers, by component; None for other operations."""
    if operation in ("vec2", "vec3", "vec4", "vec8", "vec16"):
        return [one[0] for one in operands]
    if operation in ("pack_64_2x32", "pack_32_2x16"):
        low, high = operands[0][:2]
        return [low | high << np.uint64(bits // 2)]
    if operation in ("unpack_64_2x32", "unpack_32_2x16"):
        return [_mask(operands[0][0] >> np.uint64(bits * n), bits) for n in range(components)]
    found: list[_Lanes] = []
    for n in range(components):
        if any(n >= len(one) for one in operands):
            return None
        one = _component(operation, [each[n] for each in operands], source, bits)
        if one is None:
            return None
        found.append(_mask(one, bits))
    return found


def _component(operation: str, lanes: list[_Lanes], source: int, bits: int) -> _Lanes | None:
    """Return one component of the result, with any bits above its own."""
    a, b = lanes[0], lanes[-1]
    if operation in _ARITHMETIC:
        return _ARITHMETIC[operation](a, b)
    if (match := _COMPARISON.match(operation)) is not None:
        x, y = (a, b) if match.group(1) == "u" else (_as_signed(a, source), _as_signed(b, source))
        return np.where(_COMPARED[match.group(2)](x, y), np.uint64((1 << bits) - 1), np.uint64(0))
    if (match := _PARTS.match(operation)) is not None:
        action, sign, width = match.group(1), match.group(2), int(match.group(3))
        place = b * np.uint64(width)
        if action == "insert":
            return _mask(a, width) << place
        return _as_signed(a >> place, width).view(np.uint64) if sign == "i" else _mask(a >> place, width)
    if operation in _SHIFTS:
        return _SHIFTS[operation](a, b & np.uint64(bits - 1), bits)
    if operation in _SIGNED:
        return _SIGNED[operation](_as_signed(a, bits), _as_signed(b, bits)).view(np.uint64)
    if operation in _UNARY:
        return _UNARY[operation](a)
    if operation.startswith("b2i"):
        return np.where(a != 0, np.uint64(1), np.uint64(0))
    if operation.startswith(("bcsel", "b16csel", "b32csel")):
        return np.where(a != 0, lanes[1], b)
    if operation in ("pack_64_2x32_split", "pack_32_2x16_split"):
        return a | b << np.uint64(bits // 2)
    if operation.startswith("i2i"):
        return _as_signed(a, source).view(np.uint64)
    return a if operation.startswith("u2u") else None
