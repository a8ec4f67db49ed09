"""Makes the manual page of the settings from docs/configuration.md, on standard output.

    python3 packaging/man/settings.py > packaging/man/honed.toml.5

It knows as much Markdown as that document uses: paragraphs, headings, tables, fenced blocks, code, emphasis
and links. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "docs" / "configuration.md"
_HEAD = """\
.\\" Made by packaging/man/settings.py from docs/configuration.md; change that.
.Dd November 21, 2026
.Dt HONED.TOML 5
.Os honed
.Sh NAME
.Nm honed.toml
.Nd settings of the honed service
.Sh SYNOPSIS
.Bl -item -compact
.It
.Pa /etc/honed/honed.toml
.It
.Pa /etc/honed/honed.toml.d/*.toml
.It
.Pa ~/.config/honed/honed.toml
.El
"""
_TAIL = """\
.Sh SEE ALSO
.Xr hone 1 ,
.Xr honed 8 ,
.Xr honed-tuner 8
.Pp
.Pa /usr/share/doc/honed/docs/idle.md
says what is read to find out whether the machine is idle.
"""


def page(document: str) -> str:
    """The manual page, in mdoc(7), of the Markdown text."""
    document, _, _ = document.partition(
        "\n## Memory\n"
    )  # a table of figures, which a manual page has no room for
    blocks = _blocks(document)
    next(blocks)  # the title
    made = [".Sh DESCRIPTION", *(line for block in blocks for line in _block(block))]
    made.insert(next(i for i, line in enumerate(made) if line.startswith(".Ss ")), ".Sh SETTINGS")
    headed = zip(["", *made], made, strict=False)
    kept = [line for before, line in headed if not (line == ".Pp" and before.startswith((".Sh", ".Ss")))]
    return _HEAD + "\n".join(kept) + "\n" + _TAIL


def _blocks(document: str) -> Iterator[list[str]]:
    """Lines that belong together: what stands between empty lines; a fenced block is one."""
    block: list[str] = []
    for line in document.splitlines():
        fenced = bool(block) and block[0].startswith("```")
        if fenced and line == "```":
            yield block
            block = []
        elif line.strip() or fenced:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _block(block: list[str]) -> Iterator[str]:
    first = block[0]
    if first.startswith("## "):
        yield f".Ss {_plain(first[3:])}"
        if block[1:]:
            yield from _block(block[1:])
    elif first.startswith("```"):
        yield from (".Bd -literal -offset indent", *(_escaped(line) for line in block[1:]), ".Ed")
    elif first.startswith("|"):
        yield from _table([[cell.strip() for cell in line.strip("|").split("|")] for line in block])
    else:
        yield ".Pp"
        yield from _text(" ".join(block))


def _table(rows: list[list[str]]) -> Iterator[str]:
    """Two columns become a list of terms; those of settings also say default, unit and reload."""
    yield ".Bl -tag -width Ds"
    for row in rows[2:]:
        if len(row) == 2:
            yield f".It {_plain(row[0])}"
            yield from _text(row[1][:1].upper() + row[1][1:] + ".")
            continue
        name, default, unit, effect, meaning = row
        yield f".It Cm {_plain(name)}"
        yield from _text(meaning + ".")
        yield from _text(f"Default {default}{f' {unit}' if unit else ''}. *Reload*: {effect}.")
    yield ".El"


def _text(text: str) -> Iterator[str]:
    """A paragraph in lines of 80, a sentence on a line of its own as groff wants it."""
    for sentence in re.split(r"(?<=[.:;?])\s+(?=[A-Z0-9`*(\[])", text):
        for line in textwrap.wrap(sentence, 70, break_on_hyphens=False, break_long_words=False):
            made = _formatted(line)
            yield f"\\&{made}" if made.startswith((".", "'")) else made


def _formatted(text: str) -> str:
    text = _escaped(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"\*\*([^*]+)\*\*|\*([^*]+)\*", lambda m: f"\\fI{m[1] or m[2]}\\fR", text)
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)


def _plain(text: str) -> str:
    return _escaped(text.replace("`", ""))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("~", "\\(ti").replace("°", "\\(de")


if __name__ == "__main__":
    sys.stdout.write(page(SOURCE.read_text(encoding="utf-8")))
