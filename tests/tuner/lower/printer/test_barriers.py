"""Barriers in divergent control flow are found; those that every work-item reaches are not reported."""

from __future__ import annotations

import pytest

from honed.tuner.lower.barriers import divergent_barriers

DIVERGENT = {
    "local id": "if (convert_int(get_local_id(0)) < 8) { barrier(1); }",
    "variable from a local id": "int x = get_local_id(0); if (x < 8) { barrier(1); }",
    "value from memory": "if (p[0] < 1) barrier(1);",
    "early return": "if (get_local_id(0) < 3) { return; } barrier(1);",
    "loop bound": "for (int i = 0; i < get_local_id(0); ++i) { barrier(1); }",
    "variable changed under a condition": "int x = 0; if (get_local_id(0)) { x = 1; } if (x) { barrier(1); }",
    "variable counted under a condition": "int x = 0; if (get_local_id(0)) ++x; if (x) { barrier(1); }",
    "else branch": "if (get_local_id(0)) { p[0] = 1; } else { barrier(1); }",
    "else if": "if (get_group_id(0)) { p[0] = 1; } else if (get_local_id(0)) { barrier(1); }",
    "while on memory": "int x = 0; while (x < p[1]) { ++x; barrier(1); }",
    "nested in a uniform loop": "for (int i = 0; i < 4; ++i) { if (get_local_id(0) < i) { barrier(1); } }",
    "do while": "do { barrier(1); } while (p[0]);",
    "newer name": "if (get_local_id(0)) { work_group_barrier(1); }",
}
UNIFORM = {
    "top level": "barrier(1);",
    "constant loop": "for (int i = 0; i < 8; ++i) { p[get_local_id(0)] = 1; barrier(1); }",
    "group id": "int b = (convert_int(get_group_id(0))) * 4; if (b < 12) { barrier(1); }",
    "after a guarded store": "int x = get_local_id(0); if (x < 3) { p[0] = 1; } barrier(1);",
    "in a comment": "if (get_local_id(0)) { /* barrier(1); */ p[0] = 1; // barrier(1);\n }",
    "one name, two loops": "for (int k = 0; k < 2; ++k) barrier(1); for (int k = 0; k < 3; ++k) barrier(1);",
}


@pytest.mark.parametrize("body", DIVERGENT.values(), ids=list(DIVERGENT))
def test_divergent(body: str) -> None:
    found = divergent_barriers(f"__kernel void k(__global float* p) {{ {body} }}")
    assert len(found) == 1
    assert "kernel k has a barrier under the condition" in found[0]


@pytest.mark.parametrize("body", UNIFORM.values(), ids=list(UNIFORM))
def test_uniform(body: str) -> None:
    assert divergent_barriers(f"__kernel void k(__global float* p) {{ {body} }}") == []


def test_kernels_of_one_source_are_told_apart() -> None:
    source = """
    __kernel void clean(__global float* p) { int x = get_group_id(0); if (x) { barrier(1); } }
    __kernel void faulty(__global float* p) { int x = get_local_id(0); if (x) { barrier(1); } }
    """
    (found,) = divergent_barriers(source)
    assert "kernel faulty has a barrier" in found
