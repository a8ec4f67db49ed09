"""Builds all pages and the API reference into one site: `make docs`. Needs Debian's Sphinx and MyST.

The source is the whole checkout, so that links of pages lead where they lead on a forge. Navigation follows
the index, docs/README.md. Broken links and anchors are errors.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "runtime"))
from honed.runtime import HONED_VERSION  # noqa: E402

project, author, html_show_copyright = "honed", "honed maintainers", False
version = release = HONED_VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**", "examples/README.md"]
exclude_patterns = ["docs/images"]
myst_heading_anchors = 4
nitpicky = False  # types in signatures are no pages of their own
autodoc_mock_imports = ["pyopencl", "honed.machine.opencl"]
default_role = "code"  # as docstrings use backticks
html_theme = "alabaster"
html_theme_options = {
    "page_width": "80rem",
    "body_max_width": "60rem",
    "body_min_width": "0",
    "sidebar_width": "16rem",
    "font_family": "sans-serif",
    "show_powered_by": False,
}
html_sidebars = {"**": ["about.html", "searchbox.html", "navigation.html"]}
html_copy_source = html_show_sourcelink = False
html_css_files = ["wide.css"]
html_static_path = ["static"]


class Header(Directive):
    """The functions of a C header, each with the comment before it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what Sphinx makes of the header's declarations as directives of its C domain."""
        header = ROOT / self.arguments[0]
        self.state.document.settings.env.note_dependency(str(header))
        lines = _declarations(header.read_text())
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, node, match_titles=True)
        return node.children


def _declarations(header: str) -> list[str]:
    lines: list[str] = []
    header = re.sub(r"HONED_API (HONED_MUST_CHECK )?", "", header)
    pattern = re.compile(
        r"/\* ---- (?P<title>.*?) ---- \*/"
        r"|/\*(?P<comment>.*?)\*/"
        r"|typedef struct \w+ (?P<struct>\w+);"
        r"|(?:typedef )?enum \w*\s*\{(?P<values>.*?)\} ?(?P<enum>\w*);"
        r"|^(?P<function>[a-z][^;{}#]*\([^;]*\));",
        re.DOTALL | re.MULTILINE,
    )
    comment = ""
    for match in pattern.finditer(header):
        if title := match["title"]:
            lines += [title, "-" * len(title), ""]
        elif match["comment"] is not None:
            comment = re.sub(r"^\s*\* ?", "", match["comment"], flags=re.MULTILINE).strip()
            if not match.start():  # the library's own, which docs/c.md explains
                comment = ""
        elif struct := match["struct"]:
            lines += _entry("struct", struct, comment)
            comment = ""
        elif match["values"] is not None:
            lines += _entry("enum", match["enum"] or "honed_sequence_flags", comment)
            for name, value, meaning in re.findall(
                r"(HONED_\w+) = (\d+),?(?:[ \t]*/\*(.*?)\*/)?", match["values"], re.DOTALL
            ):
                lines += [
                    f"   {line}"
                    for line in _entry(
                        "enumerator", name, f"{value}: {meaning.strip()}" if meaning else value
                    )
                ]
            comment = ""
        elif function := match["function"]:
            lines += _entry("function", " ".join(function.split()), comment)
            comment = ""
    return lines


def _entry(kind: str, declaration: str, text: str) -> list[str]:
    text = re.sub(r"`([^`]+)`", r"``\1``", text.replace("*", "\\*"))
    return [f".. c:{kind}:: {declaration}", "", *(f"   {line}" for line in text.splitlines()), ""]


def _navigate(app: Sphinx, name: str, source: list[str]) -> None:
    """Append a table of contents to the index, which leads to the same pages by the same headings."""
    if name == root_doc:
        for heading, items in re.findall(
            r"^## (.+?)\n\n(.*?)(?=\n## |\Z)", source[0], re.DOTALL | re.MULTILINE
        ):
            pages = re.findall(r"^- \[[^\]]+\]\(([\w./-]+)\.(?:md|rst)\)", items, re.MULTILINE)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages) + "\n```\n"


class _Plain(str):
    """Text that shows itself without quotes, as an annotation or a default."""

    __repr__ = str.__str__


def _default(value: Any) -> Any:
    """Return what stands for a default: a function would be shown by an address that each build changes."""
    if inspect.isfunction(value):
        return _Plain("...")
    return _Plain(value) if isinstance(value, enum.Enum) else value


def _as_written(app: Sphinx, what: str, name: str, thing: Any, *_: object) -> tuple[str, str] | None:
    """Show signatures as the source has them, but for the steps that a client's methods are written in."""
    if what not in ("class", "function", "method"):
        return None
    signature = inspect.signature(thing)
    parameters = [
        each.replace(
            annotation=_Plain(each.annotation) if isinstance(each.annotation, str) else each.annotation,
            default=_default(each.default),
        )
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    returned = "" if what == "class" else str(signature.return_annotation)
    return str(inspect.Signature(parameters)), re.sub(r"^RpcSteps\[(.*)\]$", r"\1", returned)


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.add_directive("c-header", Header)
    app.connect("source-read", _navigate)
    app.connect("autodoc-process-signature", _as_written)
