"""Pointers are declared where everything that starts from them can see them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import pytest
from tvm import te, topi

from honed.tuner.lower.opencl import LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search.draw import SpaceSampler
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm
_TOKEN = re.compile(r"[{}]|\*\s+(?P<declared>\w+_at_\d+)\s*=|\b(?P<used>\w+_at_\d+)\b")


def out_of_scope(source: str) -> Iterator[str]:
    """Pointers that are used where none of the open blocks declares them."""
    scopes: list[set[str]] = [set()]
    for found in _TOKEN.finditer(source):
        if found[0] == "{":
            scopes.append(set())
        elif found[0] == "}":
            scopes.pop()
        elif found["declared"]:
            scopes[-1].add(found["declared"])
        elif not any(found["used"] in scope for scope in scopes):
            yield found["used"]


def test_a_pointer_with_no_room_outside_of_a_loop_keeps_what_starts_from_it_inside() -> None:
    """The products of 169 pixels, 13 of which are a group's: more pointers than a loop has room for."""
    profile = imagined("gpu")
    x, w = te.placeholder((1, 512, 13, 13), "float32", "x"), te.placeholder((64, 512, 1, 1), "float32", "w")
    b = te.placeholder((1, 64, 1, 1), "float32", "b")
    func = te.create_prim_func([x, w, b, topi.nn.relu(topi.add(topi.nn.conv2d_nchw(x, w, 1, 0, 1), b))])
    drawing, target = SpaceSampler(narrow_indices(func), profile, 1), target_for(profile)
    pointers = 0
    for sketch in range(drawing.sketches):
        for one in islice(drawing.of(sketch), 8):
            try:
                source = lower_function(one.scheduled, "main", target, profile).source
            except LoweringFailed:
                continue
            assert not list(out_of_scope(source)), source
            pointers += len(re.findall(r"\w+_at_\d+ =", source))
    assert pointers
