"""Figures of how the code is built, of a checkout and of a commit before, side by side.

python -m benchmarks.house [CHECKOUT] [--against REV] [--names]

Through how many files things really pass `benchmarks.passage` counts.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, TypeGuard

PARTS: Final = ("bridges", "daemon", "runtime", "tuner")
PAGE: Final = "docs/architecture.md"
LONG_FUNCTION: Final = 40
WAYS: Final = {
    "The way of a request": "a request",
    "From an ONNX file to a served model": "an ONNX file",
    "From a draw to a new version": "a candidate",
}
_SHORT: Final = {  # folders as the page has them, by their first part
    **dict.fromkeys(("protocol", "machine", "jobs", "runtime", "onnxfile", "ort"), "runtime/honed/"),
    **dict.fromkeys(("bridge", "frigate", "http", "hub"), "bridges/honed/"),
    **dict.fromkeys(("daemon", "cpu", "tool"), "daemon/honed/"),
    **dict.fromkeys(("tuner",), "tuner/honed/"),
}
_NAMED: Final = "files that the page names on the way of"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python: its path below the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its syntax, in no order that matters."""
        return tuple(ast.walk(self.tree))

    @property
    def part(self) -> str:
        """The top folder that it is in."""
        return self.path.split("/")[0]

    @property
    def name(self) -> str:
        """As it is imported; a package by its own name."""
        return ".".join(PurePosixPath(self.path).with_suffix("").parts[1:]).removesuffix(".__init__")

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        return self.name if self.path.endswith("/__init__.py") else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Lines:
    """How many lines of a file are what; the rest is blank."""

    code: int
    docstrings: int
    comments: int


@dataclass(frozen=True)
class House:
    """The code of a checkout or commit, and the page with the ways through it; "" where there is none."""

    modules: tuple[Module, ...]
    page: str

    def lines(self, part: str) -> Lines:
        """Of a part, all files together."""
        counted = [lines_of(module) for module in self.modules if module.part == part]
        return Lines(
            sum(c.code for c in counted),
            sum(c.docstrings for c in counted),
            sum(c.comments for c in counted),
        )


def from_checkout(root: Path) -> House:
    """What is in a folder now; raises SystemExit where it is no checkout of honed."""
    files = sorted(path for part in PARTS for path in (root / part).rglob("*.py"))
    if not files:
        raise SystemExit(f"{root} has no {', '.join(PARTS)}; name a checkout of honed")
    page = root / PAGE
    modules = tuple(Module(path.relative_to(root).as_posix(), path.read_text()) for path in files)
    return House(modules, page.read_text() if page.exists() else "")


def from_commit(root: Path, revision: str) -> House:
    """What a commit has; raises SystemExit where git does not know it."""
    done = subprocess.run(["git", "-C", root, "archive", revision], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git has no {revision} to compare with: {done.stderr.decode().strip()}")
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            python = member.name.endswith(".py") and member.name.split("/")[0] in PARTS
            if (python or member.name == PAGE) and (file := archive.extractfile(member)) is not None:
                texts[member.name] = file.read().decode()
    page = texts.pop(PAGE, "")
    return House(tuple(Module(path, text) for path, text in sorted(texts.items())), page)


def lines_of(module: Module) -> Lines:
    """A line with code and a comment is code; a docstring's blank lines are its own."""
    docstrings = {line for node in _docstrings(module) for line in _span(node)}
    strings = {line for n in module.nodes if isinstance(n, ast.Constant | ast.JoinedStr) for line in _span(n)}
    code = comments = 0
    for number, line in enumerate(module.text.splitlines(), 1):
        if number in docstrings or not line.strip():
            continue
        if line.lstrip().startswith("#") and number not in strings:
            comments += 1
        else:
            code += 1
    return Lines(code, len(docstrings), comments)


def maps(house: House) -> list[str]:
    """Lines that speak of maps of anything, as FILE:LINE."""
    return sorted(
        {f"{module.path}:{node.lineno}" for module in house.modules for node in module.nodes if _is_map(node)}
    )


def aliased_maps(house: House) -> list[str]:
    """Lines that speak of such maps by another name, as FILE:LINE name, but for where it is given to them."""
    given = {
        (module.name, target.id)
        for module in house.modules
        for node in module.tree.body
        if isinstance(node, ast.Assign) and _is_map(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for module in house.modules:
        names = {name for where, name in given if where == module.name}
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                base = _base(module, node)
                names |= {alias.name for alias in node.names if (base, alias.name) in given}
        found |= {
            f"{module.path}:{node.lineno} {node.id}"
            for node in module.nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        }
    return sorted(found)


def callbacks(house: House) -> list[str]:
    """Attributes named on_... and given a value or declared as callable, as FILE:LINE name."""
    return sorted(
        {
            f"{module.path}:{node.lineno} {name}"
            for module in house.modules
            for node in module.nodes
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for name in _assigned(node)
            if name.startswith("on_")
        }
    )


def cycles(house: House, *, deferred: bool = False) -> list[str]:
    """Groups of modules that import each other; `deferred` counts imports in functions and for types, too."""
    found: dict[str, set[str]] = {module.name: set() for module in house.modules}
    for one, other in links(house, deferred=deferred):
        found[one] |= {other} - {one}
    return _circles(found)


def package_cycles(house: House) -> list[str]:
    """Groups of packages that import each other, by any import. What lies beside packages is one, too."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, imported in links(house, deferred=True):
        one, other = _apart(module.split("."), imported.split("."))
        if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
            found[one].add(other)
            found.setdefault(other, set())
    return _circles(found)


def links(house: House, *, deferred: bool) -> Iterator[tuple[str, str]]:
    """Each module with one of the house that it imports; `deferred` as in `cycles`."""
    known = {module.name for module in house.modules}
    for module in house.modules:
        for node in _imports(module, deferred):
            yield from ((module.name, found) for found in _imported(module, node, known))


def _apart(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Where two modules part: the packages or modules below the innermost package that holds both."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return ".".join(one[: shared + 1]), ".".join(other[: shared + 1])


def _circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Groups of names that reach each other."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(", ".join(sorted(group)) for group in groups)


def long_functions(house: House) -> list[str]:
    """Functions of more than LONG_FUNCTION lines, as FILE:LINE name."""
    return [
        f"{module.path}:{node.lineno} {node.name}"
        for module in house.modules
        for node in module.nodes
        if isinstance(node, _Function) and len(_span(node)) > LONG_FUNCTION
    ]


def way(house: House, heading: str) -> list[str]:
    """Files and folders that the steps under a heading of the page name, each once.

    A bare name lies in the folder that the same step named last; raises SystemExit for one that is not there.
    """
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", house.page, re.MULTILINE | re.DOTALL)
    found: dict[str, None] = {}
    there = {module.path for module in house.modules}
    there |= {f"{parent}/" for path in there for parent in PurePosixPath(path).parents}
    for step in re.findall(r"^\d+\. .*", section.group(1), re.MULTILINE) if section else ():
        folder = ""
        for named in re.findall(r"`([\w/]+(?:\.py|/))`", step):
            first, slash, _ = named.partition("/")
            path = _SHORT[first] + named if slash and first in _SHORT else folder + named
            if path not in there:
                raise SystemExit(f"{PAGE} names {named} under {heading!r}, but there is no {path}")
            found[path] = None
            folder = path if path.endswith("/") else path[: path.rindex("/") + 1]
    return list(found)


def figures(house: House) -> Iterator[tuple[str, int | list[str]]]:
    """Each figure by its name: a number, or what is to be counted."""
    for part in PARTS:
        lines = house.lines(part)
        yield f"lines of code, {part}", lines.code
        yield f"lines of docstrings, {part}", lines.docstrings
        yield f"lines of comments, {part}", lines.comments
    yield "lines of code, together", sum(house.lines(part).code for part in PARTS)
    counted: dict[str, Callable[[House], list[str]]] = {
        "lines with `dict[str, Any]` or `Mapping[str, Any]`": maps,
        "lines with such a map by another name": aliased_maps,
        "callbacks (`on_...` attributes)": callbacks,
        "import cycles": cycles,
        "import cycles, with imports in functions and for types": lambda house: cycles(house, deferred=True),
        "import cycles of packages": package_cycles,
        f"functions over {LONG_FUNCTION} lines": long_functions,
    }
    for name, count in counted.items():
        yield name, count(house)
    for heading, what in WAYS.items():
        yield f"{_NAMED} {what}", way(house, heading)


def table(columns: Mapping[str, House]) -> str:
    """The figures in Markdown, a column for each house; "-" where there is nothing to count."""
    rows: dict[str, list[str]] = {}
    for house in columns.values():
        for name, found in figures(house):
            absent = name.startswith(_NAMED) and not house.page
            value = found if isinstance(found, int) else len(found)
            rows.setdefault(name, []).append("-" if absent else f"{value:,}")
    lines = [("what", *columns), ("---", *["---:"] * len(columns))]
    lines += [(name, *values) for name, values in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", metavar="REV", help="a commit to show beside it")
    parser.add_argument("--names", action="store_true", help="name what is counted, too")
    asked = parser.parse_args(arguments)
    now = from_checkout(asked.checkout)
    before = {asked.against: from_commit(asked.checkout, asked.against)} if asked.against else {}
    print(table({**before, "now": now}))
    if asked.names:
        for name, found in figures(now):
            if not isinstance(found, int):
                print(f"\n{name}:", *found, sep="\n  ")


def _span(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt | ast.expr)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstrings(module: Module) -> Iterator[ast.expr]:
    for node in module.nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    """Attributes that an assignment sets, or that it declares to be callable."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    yield from (target.attr for target in targets if isinstance(target, ast.Attribute))
    yield from (
        target.id
        for target in targets
        if isinstance(node, ast.AnnAssign)
        and isinstance(target, ast.Name)
        and "Callable" in ast.unparse(node.annotation)
    )


def _imports(module: Module, deferred: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    waiting: list[ast.AST] = [module.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if deferred or not (for_types or isinstance(node, _Function)):
            waiting += ast.iter_child_nodes(node)


def _imported(module: Module, node: ast.Import | ast.ImportFrom, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
        return
    base = _base(module, node)
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if inner in known:
            yield inner
        elif base in known:
            yield base


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The full name of what it imports from."""
    if not node.level:
        return node.module or ""
    above = module.package.split(".")
    above = above[: len(above) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _is_map(node: ast.AST) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and ast.unparse(node) in ("dict[str, Any]", "Mapping[str, Any]")


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """What is imported from there, by any number of steps."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


if __name__ == "__main__":
    main()
