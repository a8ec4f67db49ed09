"""How one record of a driver begins, and what it means: a row of its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Final, Literal, cast, get_args

from .fault import Driver, Severity

FieldName = Literal[
    "tgid", "tid", "comm", "context", "group", "slot", "stream", "address_space", "code", "status", "address",
    "name", "access",
]  # fmt: skip
FIELD_NAMES: Final = get_args(FieldName)
# The format, where the driver writes it (see `SourceTree.sources`), and the fields, "-" for what is none.
Row = tuple[str, str] | tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class DriverSource:
    """Where a driver writes a record: its file and function, and the first and last version looked into."""

    file: str
    function: str
    versions: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """A record that begins as printf would write `format`, the driver's own.

    `format` may leave out the end. `fields` names the fields of Fault that its conversions become, in order;
    the status (whose low byte is the code), the code and the address are hexadecimal. `expression` stands in
    for both where they do not tell enough; its named groups are the fields.
    """

    format: str
    severity: Severity
    kind: str
    sources: tuple[DriverSource, ...]
    _: KW_ONLY
    fields: tuple[FieldName | None, ...] = ()
    expression: str | None = None
    driver: Driver | None = None  # where it is another than that of the table
    by_code: Mapping[int, Severity] | None = None  # in place of `severity`
    hang: bool = False
    announces: bool = False  # names the owner of the record that the driver writes next
    consequence: bool = False

    @property
    def start(self) -> re.Pattern[str]:
        """Matches the start of the record, after what the driver puts before every message."""
        return _compiled(self.format, self.fields, self.expression)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """Where the files of a driver lie, and what its versions are of."""

    folder: str = ""
    release: str = ""
    driver: Driver | None = None  # where it is another than that of the table

    def sources(self, written: str) -> tuple[DriverSource, ...]:
        """Places in files below the folder, as "FILE FUNCTION VERSIONS; ..."."""
        places = (place.split(" ", 2) for place in written.split("; "))
        return tuple(DriverSource(self.folder + f, function, self.release + v) for f, function, v in places)

    def rows(
        self,
        kind: str,
        severity: Severity,
        *,
        by_code: Mapping[int, Severity] | None = None,
        hang: bool = False,
        announces: bool = False,
        consequence: bool = False,
    ) -> Callable[[*tuple[Row, ...]], tuple[Pattern, ...]]:
        """Takes the records of one kind, in the order in which they are tried."""
        return lambda *rows: tuple(
            Pattern(
                format_,
                severity,
                kind,
                self.sources(written),
                fields=_fields(*names),
                driver=self.driver,
                by_code=by_code,
                hang=hang,
                announces=announces,
                consequence=consequence,
            )
            for format_, written, *names in rows
        )


def _fields(names: str = "") -> tuple[FieldName | None, ...]:
    fields = names.split()
    if unknown := set(fields) - {"-", *FIELD_NAMES}:
        raise ValueError(f"{', '.join(unknown)}: no field of Fault; the fields are {', '.join(FIELD_NAMES)}")
    return tuple(cast(FieldName, name) if name != "-" else None for name in fields)


def starts(expression: str) -> re.Pattern[str]:
    """Compile an expression for the start of a record: ASCII digits, `^` and `$` at every line."""
    return re.compile(expression, re.ASCII | re.MULTILINE)


@cache  # late: of the hundreds of rows a machine needs those of its own driver
def _compiled(written: str, fields: tuple[FieldName | None, ...], expression: str | None) -> re.Pattern[str]:
    return starts(_expression(written, fields) if expression is None else expression)


_CONVERSION = re.compile(r"%(%|[-+ #0]*[\d*]*(?:\.\d+)?(?:hh|h|ll|l|z)?(?:[diuxXsc]|p[A-Za-z]*))")
_PADDED = re.compile(r"[-+ #]*[1-9]\d*[^\d.]")  # a width, with blanks
_HEX = r"[0-9A-Fa-f]{1,16}"
_TEXT_CHARACTERS = 100  # of a %s or %p; bounded, so that hostile text costs no more than its length
_DECIMAL = r"-?\d{1,20}"


def _expression(written: str, fields: tuple[FieldName | None, ...]) -> str:
    """The regular expression for what printf writes."""
    parts, end, names = [], 0, iter(fields)
    for found in _CONVERSION.finditer(written):
        parts.append(re.escape(written[end : found.start()]))
        end = found.end()
        parts.append(
            "%" if found[1] == "%" else _conversion(found[1], next(names, None), end == len(written))
        )
    if (left := next(names, None)) is not None:
        raise ValueError(f"{written!r} has no conversion for {left}")
    parts.append(re.escape(written[end:]))
    return "".join(parts) + (r"(?!\w)" if re.search(r"\w\Z", written) else "")


def _conversion(found: str, name: FieldName | None, last: bool) -> str:
    """The expression for one conversion, a group where it has a name."""
    pointer = "p" in found
    if pointer and name is not None:
        # What a kernel hides it writes as (ptrval).
        return rf"(?:(?:0x)?(?P<{name}>{_HEX})(?!\w)|\(\w{{1,20}}\))"
    if pointer or found[-1] in "sc":
        inner = rf"[^\n]{{0,{_TEXT_CHARACTERS}}}" + ("" if last else "?")
    elif found[-1] in "xX":
        padding = r" {0,20}" if _PADDED.match(found) else ""
        return rf"{padding}(?:0x)?" + (rf"(?P<{name}>{_HEX})" if name is not None else _HEX)
    else:
        inner = _DECIMAL
    return inner if name is None else f"(?P<{name}>{inner})"
