"""`hone fit`: what of a file would run where."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from honed.jobs.commands import Fit
from honed.jobs.events import Fitted, FittedPart
from honed.protocol.errors import HonedError
from honed.protocol.strict import to_plain
from honed.tool import compiler
from honed.tool.output import Console, Output, bytes_text, fields, line, table
from honed.tool.parser import Parser, UsageError, add_compile_options, define, unique

_ENGINES = {"gpu": "compiled", "cpu": "CPU engine"}


def define_fit(fit: Parser) -> None:
    """What `hone fit` takes."""
    define(
        fit,
        _fit,
        details=(
            "Nothing is added, and no kernel is made; that takes seconds. Which engine is faster only adding "
            "tells, which compares them. The exit status is 1 where a file would not be served."
        ),
        examples="""\
            hone fit detector.onnx
            hone fit yolox.onnx --shape images=1,3,416,416
            hone fit *.onnx --json""",
    )
    fit.add_argument("files", metavar="FILE", type=Path, nargs="+", help="an ONNX file")
    add_compile_options(fit)
    fit.add_argument("--profile", metavar="FILE", type=Path, help="device profile to compile for")
    fit.add_argument(
        "--device", metavar="SPEC", help="OpenCL device to compile for: a number or part of its name"
    )


def _fit(arguments: argparse.Namespace, output: Output) -> int:
    if len(arguments.files) > 1 and arguments.shape:
        raise UsageError("--shape is of one model, and several are given; look at that one by itself")
    told: list[dict[str, object]] = []
    served = True
    for file in arguments.files:
        try:
            found = _found(file, arguments)
        except HonedError as error:
            if len(arguments.files) == 1:
                raise
            served = False
            told.append({"file": str(file), "error": str(error)})
            text = f"{file}: would not be served: {error}"
            if not output.json:
                output.emit({}, lambda console, text=text: line(console, text))  # type: ignore[misc]
            continue
        served = served and _serves(found)
        told.append({"file": str(file), "served": _serves(found), **to_plain(found)})
        if not output.json:
            output.emit(found, lambda console, f=file, found=found: _print(console, f, found))  # type: ignore[misc]
    if output.json:
        output.emit({"files": told}, lambda _: None)
    return int(not served)


def _found(file: Path, arguments: argparse.Namespace) -> Fitted:
    job = Fit(
        file=file,
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        profile=arguments.profile,
        device=arguments.device,
    )
    return compiler.run(job, f"fit {file.name}")


def _serves(found: Fitted) -> bool:
    return not found.reasons or found.cpu_engine


def _print(console: Console, file: Path, found: Fitted) -> None:
    console.print(fields([
        ("file", str(file)),
        ("served", _verdict(found)),
        ("inputs", "; ".join(found.inputs)),
        ("outputs", "; ".join(found.outputs)),
        ("size", bytes_text(found.nbytes)),
    ]))  # fmt: skip
    console.print()
    console.print(table(("part", ">nodes", ">operations", "why"), map(_row, found.parts)))
    for reason in found.reasons:
        line(console, f"not compiled: {reason}")
    for note in found.notes:
        line(console, f"note: {note}")


def _verdict(found: Fitted) -> str:
    if not _serves(found):
        return "no: nothing of it is compiled, and the CPU engine is not installed (honed-cpu)"
    if found.reasons:
        return "by the CPU engine alone"
    if len(found.parts) > 1:
        return f"in {len(found.parts)} parts, {_share(found.parts):.1%} of the operations compiled"
    at_once = ", by the CPU engine until it is" if found.cpu_engine else ""
    return f"compiled whole{at_once}"


def _share(parts: Sequence[FittedPart]) -> float:
    compiled = sum(part.flops for part in parts if part.engine == "gpu")
    return compiled / max(1, sum(part.flops for part in parts))


def _row(part: FittedPart) -> tuple[str, ...]:
    whys = [*part.why, *(["compiled for sizes once it meets them"] if part.sized else [])]
    return (
        _ENGINES[part.engine],
        str(part.nodes),
        f"{part.flops:,}" if part.flops else "-",
        "; ".join(whys),
    )
