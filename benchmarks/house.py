"""Figures of how the code is built, of a checkout and of an earlier commit, side by side.

python -m benchmarks.house [CHECKOUT] [--against REV] [--run] [--names]

With --run a real service also counts what runs (`benchmarks.passage`, some minutes a column).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from benchmarks.passage.__main__ import passed, ways

_RUN: Final = "RunModel"  # Call that a worker gets
PARTS: Final = ("daemon", "extensions", "runtime", "tuner")
# Files that a board does not need, in commits before their own folder, too.
_EXTENSION: Final = re.compile(
    r"(extensions|bridges|tuner/honed/tuner/(farm|learn|valhall)|daemon/honed/tool/report)/"
    r"|daemon/honed/tool/commands/(farm|hub)\.py$"
)
PAGE: Final = "docs/dev/architecture.md"
_PAGES: Final = ("benchmarks", "docs", "tests")
WAYS: Final = (  # Headings of the page that describe ways through the code
    "The way of a request",
    "From an ONNX file to a served model",
    "From a draw to a new version",
)
# The class whose subclasses are what the service does not need for a plain model, wherever they are, and the
# modules that may know of them: where all is put together.
_FEATURE: Final = "Feature"
_TOGETHER: Final = ("service", "assembly", "config")
# Functions that start a process. Each module that does so has its own protocol, except those below, which are
# protocols themselves: jobs, typed calls, and the standard library's pickles.
_STARTERS: Final = frozenset({"spawn", "start", "output"})
_CHILDREN: Final = ("honed.process.children", "honed.process.rpc")
_LOOP: Final = "honed.process.aio"  # Typed calls in an event loop
_PICKLES: Final = frozenset({"multiprocessing", "ProcessPoolExecutor"})
_CHANNELS: Final = frozenset({"stdout", "pass_fds"})  # Arguments by which a child can answer
_SHORT: Final = {  # Folders as on the page, by their first part
    **dict.fromkeys(
        ("protocol", "machine", "process", "jobs", "runtime", "onnxfile", "ort"), "runtime/honed/"
    ),
    **dict.fromkeys(
        ("bridge", "farm", "frigate", "http", "hub", "learn", "report", "valhall"), "extensions/honed/"
    ),
    **dict.fromkeys(("daemon", "cpu", "tool"), "daemon/honed/"),
    **dict.fromkeys(("tuner",), "tuner/honed/"),
}


@dataclass(frozen=True)
class Module:
    """A file of Python: its path below the root, and its text."""

    path: str
    text: str

    @cached_property
    def imports(self) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
        """The imports, each with whether it is inside a function or for types alone.

        Only statements contain statements, so expressions, most of a tree, are skipped.
        """
        found = []
        waiting: list[tuple[ast.AST, bool]] = [(ast.parse(self.text), False)]
        while waiting:
            node, deferred = waiting.pop()
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.append((node, deferred))
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            deferred |= for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, field, ())
                waiting += [(each, deferred) for each in inner] if isinstance(inner, list) else ()
        return tuple(found)

    @property
    def part(self) -> str:
        """The top folder that it belongs in."""
        return "extensions" if _EXTENSION.match(self.path) else self.path.split("/")[0]

    @property
    def name(self) -> str:
        """The name by which it is imported; a package's own name for `__init__`."""
        return ".".join(PurePosixPath(self.path).with_suffix("").parts[1:]).removesuffix(".__init__")

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.endswith("/__init__.py") else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class House:
    """The code of a checkout, and its pages by their paths below the root."""

    modules: tuple[Module, ...]
    pages: Mapping[str, str]

    @property
    def page(self) -> str:
        """The page with the ways through the code; "" without one."""
        return self.pages.get(PAGE, "")


@dataclass(frozen=True)
class Lines:
    """The numbers of lines of code, of prose and of imports in a file; imports are code, too."""

    code: int
    prose: int
    imports: int


def from_checkout(root: Path) -> House:
    """Return the modules and pages in a folder; raise SystemExit if it is no checkout of honed."""
    files = sorted(path for part in (*PARTS, "bridges") for path in (root / part).rglob("*.py"))
    if not files:
        raise SystemExit(f"{root} has no {', '.join(PARTS)}; name a checkout of honed")
    pages = [*root.glob("*.md"), *(path for folder in _PAGES for path in (root / folder).rglob("*.md"))]
    return House(
        tuple(Module(path.relative_to(root).as_posix(), path.read_text()) for path in files),
        {path.relative_to(root).as_posix(): path.read_text() for path in pages},
    )


@contextlib.contextmanager
def checked_out(root: Path, revision: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit; raise SystemExit if git does not know it."""
    done = subprocess.run(["git", "-C", root, "archive", revision], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git has no {revision} to compare with: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="honed-house-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def lines_of(module: Module) -> Lines:
    """Count lines. One with code and a comment is code; docstrings and other comments are prose."""
    nodes = list(ast.walk(ast.parse(module.text)))
    docstrings = {line for node in nodes for line in _docstring(node)}
    strings = {line for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr) for line in _span(n)}
    imports = {line for node in _imports(module, deferred=True) for line in _span(node)}
    code, prose = 0, len(docstrings)
    for number, line in enumerate(module.text.splitlines(), 1):
        if number in docstrings or not line.strip():
            continue
        if line.lstrip().startswith("#") and number not in strings:
            prose += 1
        else:
            code += 1
    return Lines(code, prose, len(imports))


def features(house: House) -> set[str]:
    """Return the modules that define a feature, and those of a folder of features."""
    defining = {
        module.name
        for module in house.modules
        for node in ast.walk(ast.parse(module.text))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == _FEATURE for base in node.bases)
    }
    return defining | {m.name for m in house.modules if m.name.startswith("honed.daemon.features")}


def into_features(house: House) -> list[str]:
    """Return imports of features by other modules than features and assembly, as MODULE imports MODULE."""
    together = {f"honed.daemon.{name}" for name in _TOGETHER}
    found = features(house)
    return sorted(
        {
            f"{module} imports {imported}"
            for module, imported in links(house, deferred=True)
            if imported in found and module not in found and module not in together
        }
    )


def misplaced_features(house: House) -> list[str]:
    """Return the modules that define a feature outside the folder of features."""
    return sorted(name for name in features(house) if not name.startswith("honed.daemon.features"))


def by_string(house: House) -> list[str]:
    """Return where a string names a module of another top folder, as MODULE names MODULE."""
    part = {module.name: module.part for module in house.modules}
    return sorted(
        {
            f"{module.name} names {node.value}"
            for module in house.modules
            for node in ast.walk(ast.parse(module.text))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and part.get(node.value, module.part) != module.part
        }
    )


def request_ways(house: House) -> list[str]:
    """Return the functions of the service that make the run of a request for a worker: each is a way."""
    found = []
    for module in house.modules:
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                made = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                if any(isinstance(func, ast.Name) and func.id == _RUN for func in made):
                    found.append(f"{module.path}: {node.name}")
    return found


def child_protocols(house: House) -> list[str]:
    """Return the modules that are a protocol with child processes, or speak to them in a way of their own."""
    speaking = [m for m in house.modules if m.name != _LOOP]
    return [m.path for m in speaking if m.name in _CHILDREN or _pickles(m) or _speaks(m)]


def _pickles(module: Module) -> bool:
    """Return whether a module starts processes by the standard library, which pickles messages."""
    names = {
        name
        for node in _imports(module, deferred=True)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
    }
    return bool(names & _PICKLES)


def _speaks(module: Module) -> bool:
    """Return whether a module starts processes that can answer."""
    imported = [
        (_base(module, node), alias)
        for node in _imports(module, deferred=True)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    names = {
        a.asname or a.name for base, a in imported if base in (*_CHILDREN, _LOOP) and a.name in _STARTERS
    }
    modules = {a.asname or a.name for base, a in imported if f"{base}.{a.name}" in (*_CHILDREN, _LOOP)}
    calls = [node for node in ast.walk(ast.parse(module.text)) if isinstance(node, ast.Call)]
    starts = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in names]
    starts += [
        node
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in _STARTERS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in modules
    ]
    answering = [node for node in starts if any(word.arg in _CHANNELS for word in node.keywords)]
    return bool(answering) or (bool(names) and not starts)


def cycles(house: House, *, deferred: bool = False) -> list[str]:
    """Return groups of modules that import each other; `deferred` adds imports in functions and for types."""
    found: dict[str, set[str]] = {module.name: set() for module in house.modules}
    for one, other in links(house, deferred=deferred):
        found[one] |= {other} - {one}
    return _circles(found)


def package_cycles(house: House) -> list[str]:
    """Return groups of packages that import each other, by any import.

    A module beside packages counts as one.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for module, imported in links(house, deferred=True):
        one, other = _apart(module.split("."), imported.split("."))
        if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
            found[one].add(other)
            found.setdefault(other, set())
    return _circles(found)


def links(house: House, *, deferred: bool) -> Iterator[tuple[str, str]]:
    """Yield each module with each of the house's modules that it imports; `deferred` as in `cycles`."""
    known = {module.name for module in house.modules}
    for module in house.modules:
        for node in _imports(module, deferred):
            yield from ((module.name, found) for found in _imported(module, node, known))


def _apart(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return where two modules diverge: the packages or modules below their innermost common package."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return ".".join(one[: shared + 1]), ".".join(other[: shared + 1])


def _circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Return groups of names that reach each other."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(", ".join(sorted(group)) for group in groups)


def way(house: House, heading: str) -> list[str]:
    """Return files and folders that the steps under a heading of the page name, each once.

    A bare name lies in the folder that the same step named last; raises SystemExit for one that does not
    exist.
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


def words(text: str) -> int:
    """Return how many words a page has; the strokes of tables and lists are none."""
    return len(re.findall(r"\S*\w\S*", text))


def figures(house: House, root: Path | None = None) -> Iterator[tuple[str, str | list[str]]]:
    """Yield each figure by its name: a number, or the items to count. Only `root` is run."""
    every = [(module.part, lines_of(module)) for module in house.modules]
    yield "files", f"{len(every):,}"
    for part in PARTS:
        yield f"lines of code, {part}", f"{sum(lines.code for found, lines in every if found == part):,}"
    code = sum(lines.code for _, lines in every)
    core = sum(lines.code for part, lines in every if part != "extensions")
    yield "lines of code, without extensions", f"{core:,}"
    yield "lines of code, together", f"{code:,}"
    yield "lines of docstrings and comments", f"{sum(lines.prose for _, lines in every):,}"
    yield "share of imports in lines of code", f"{sum(lines.imports for _, lines in every) / code:.1%}"
    yield "words of all pages", f"{sum(map(words, house.pages.values())):,}"
    yield "imports of layers from features", into_features(house)
    yield "features outside their folder", misplaced_features(house)
    yield "modules named by a string in another part", by_string(house)
    yield "ways of a request", request_ways(house)
    yield "protocols with child processes", child_protocols(house)
    yield "import cycles", cycles(house)
    yield "import cycles of packages", package_cycles(house)
    if root is not None:
        for what, files in ways(passed(root)).items():
            yield f"files that run for {what}", files


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", metavar="REV", help="a commit to show beside it")
    parser.add_argument("--run", action="store_true", help="count what runs in a real service, too")
    parser.add_argument("--names", action="store_true", help="name what is counted, too")
    asked = parser.parse_args(arguments)

    def counted(root: Path) -> dict[str, str | list[str]]:
        return dict(figures(from_checkout(root), root.resolve() if asked.run else None))

    columns: dict[str, Mapping[str, str | list[str]]] = {}
    if asked.against:
        with checked_out(asked.checkout, asked.against) as before:
            columns[asked.against] = counted(before)
    columns["now"] = now = counted(asked.checkout)
    lines = [("what", *columns), ("---", *["---:"] * len(columns))]
    for name in now:
        cells = (column[name] for column in columns.values())
        lines.append((name, *(found if isinstance(found, str) else str(len(found)) for found in cells)))
    print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n")
    if asked.names:
        for name, found in now.items():
            if not isinstance(found, str):
                print(f"\n{name}:", *found, sep="\n  ")


def _span(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt | ast.expr)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstring(node: ast.AST) -> range:
    """Return the lines of a node's docstring; none if it has none."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return range(0)
    return _span(node.body[0]) if ast.get_docstring(node, clean=False) is not None else range(0)


def _imports(module: Module, deferred: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    yield from (node for node, later in module.imports if deferred or not later)


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
    """Return the full name of the module that it imports from."""
    if not node.level:
        return node.module or ""
    above = module.package.split(".")
    above = above[: len(above) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return what is imported from there, by any number of steps."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


if __name__ == "__main__":
    main()
