"""Finds barriers in divergent control flow in generated OpenCL C.

OpenCL requires that every work-item of a work-group reaches a barrier or none does (OpenCL C 3.0, 6.15.8);
a kernel that breaks this may hang or fault the GPU. The check follows the control flow of the source as the
printer writes it (if/else, for and while with braces): a condition is uniform when it is made only of
literals, group ids, sizes and variables that were themselves assigned from uniform expressions; everything
else (local and global ids, values read from memory, variables assigned twice) may differ between work-items.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_TOKEN = re.compile(
    r"[A-Za-z_]\w*|\d[\w.]*|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\+\+|--|[{}()\[\];,?:.=<>!&|^~*/%+-]|#[^\n]*"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BARRIERS = {"barrier", "work_group_barrier", "sub_group_barrier"}
_UNIFORM_CALLS = {
    "get_group_id", "get_num_groups", "get_local_size", "get_global_size", "get_enqueued_local_size",
    "get_work_dim", "convert_int", "convert_uint", "convert_long", "convert_ulong", "min", "max",
}  # fmt: skip
_TYPES = {
    "int", "uint", "long", "ulong", "short", "ushort", "char", "uchar", "bool", "size_t", "const", "float",
}  # fmt: skip
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="}


def divergent_barriers(source: str) -> list[str]:
    """Return what is wrong with each barrier of `source` that not every work-item of a group may reach."""
    if not any(barrier in source for barrier in _BARRIERS):
        return []  # Most kernels have none, and parsing them takes a fortieth of compiling
    kernels = _COMMENT.sub(" ", source).split("__kernel")
    return [found for kernel in kernels for found in _Walk(_TOKEN.findall(kernel)).run()]


class _Walk:
    """A pass over a kernel's tokens with a stack of the conditions that enclose them."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.kernel = next((name for kind, name in pairwise(tokens) if kind == "void"), "?")
        self.uniform: set[str] = set()
        self.reassigned = _find_reassigned(tokens)
        self.left_under = ""  # The condition under which some work-items may have left already

    def run(self) -> Iterator[str]:
        while self.at < len(self.tokens):
            if self.tokens[self.at] == "{":
                yield from self._block(())
            else:
                self.at += 1

    def _block(self, under: tuple[str, ...]) -> Iterator[str]:
        self.at += 1  # {
        while self.at < len(self.tokens) and self.tokens[self.at] != "}":
            yield from self._statement(under)
        self.at += 1  # }

    def _statement(self, under: tuple[str, ...]) -> Iterator[str]:
        token = self.tokens[self.at]
        if token == "{":
            yield from self._block(under)
        elif token in ("if", "for", "while", "switch"):
            yield from self._conditional(token, under)
        elif token == "do":
            # A do's condition is last, so it counts as divergent; the generator never writes one.
            self.at += 1
            yield from self._statement((*under, "do"))
        else:
            yield from self._simple(under)

    def _conditional(self, kind: str, under: tuple[str, ...]) -> Iterator[str]:
        self.at += 1
        header = self._take_parenthesised()
        if kind == "for":
            self._assign(header[: header.index(";")] if ";" in header else header, bool(under))
        inner = under if self._is_uniform(header) else (*under, " ".join(header))
        yield from self._statement(inner)
        while kind == "if" and self.at < len(self.tokens) and self.tokens[self.at] == "else":
            self.at += 1
            yield from self._statement(inner)

    def _take_parenthesised(self) -> list[str]:
        start, depth = self.at + 1, 0
        while self.at < len(self.tokens):
            depth += {"(": 1, ")": -1}.get(self.tokens[self.at], 0)
            self.at += 1
            if depth == 0:
                break
        return self.tokens[start : self.at - 1]

    def _simple(self, under: tuple[str, ...]) -> Iterator[str]:
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at] not in (";", "{", "}"):
            self.at += 1
        statement = self.tokens[start : self.at]
        if self.at < len(self.tokens) and self.tokens[self.at] == ";":
            self.at += 1
        condition = under[-1] if under else self.left_under
        if condition and _BARRIERS.intersection(statement):
            yield (
                f"kernel {self.kernel} has a barrier under the condition ({condition}), "
                "which may differ between work-items"
            )
        if under and statement[:1] and statement[0] in ("return", "break", "continue", "goto"):
            self.left_under = under[-1]
        self._assign(statement, bool(under))

    def _assign(self, statement: list[str], divergent: bool) -> None:
        """Note whether `T name = expression` leaves the name uniform."""
        target = _target(statement)
        if target is None:
            return
        value = statement[statement.index("=") + 1 :] if "=" in statement else []
        if not divergent and target not in self.reassigned and self._is_uniform(value):
            self.uniform.add(target)
        else:
            self.uniform.discard(target)

    def _is_uniform(self, expression: list[str]) -> bool:
        known = _TYPES | _UNIFORM_CALLS | self.uniform
        return "[" not in expression and all(
            token in known for token in expression if token[0].isalpha() or token[0] == "_"
        )


def _target(statement: list[str]) -> str | None:
    """Return the variable that a statement assigns, or None if it assigns none."""
    for n, token in enumerate(statement):
        if token in _ASSIGNMENTS:
            name = statement[n - 1] if n else ""
            return name if name.isidentifier() else None
        if token in ("++", "--"):
            near = [*statement[n + 1 : n + 2], *statement[max(n - 1, 0) : n]]
            return next((name for name in near if name.isidentifier()), None)
    return None


def _find_reassigned(tokens: list[str]) -> set[str]:
    """Return variables assigned more than once outside for headers; their value depends on the path taken."""
    seen: set[str] = set()
    twice: set[str] = set()
    statement: list[str] = []
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token in "{}" or (token == ";" and depth == 0):
            target = None if "for" in statement[:1] else _target(statement)
            if target is not None:
                (twice if target in seen else seen).add(target)
            statement = []
        else:
            statement.append(token)
    return twice
