"""Implements the commands that run the compiler here, without the service: compile, demo and fit."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Compile, Demo, Fit
from honed.jobs.events import CompileDone, Fitted, FittedPart
from honed.protocol.errors import HonedError
from honed.protocol.strict import to_plain
from honed.protocol.values import engine_name
from honed.tool import compiler
from honed.tool.output import Console, Output, bytes_text, fields, line, table
from honed.tool.parser import Parser, UsageError, add_compile_options, count, define, seconds, unique


def define_compile(compile_: Parser) -> None:
    """Define the arguments of `hone compile`."""
    define(
        compile_,
        _compile,
        details=(
            "With --profile it compiles for the machine where 'hone doctor --profile FILE' wrote it; the "
            "answers are then checked there, when the .honed file is added."
        ),
        examples="""\
            hone compile lightglue.onnx -o lightglue.honed
            hone compile yolox.onnx -o yolox.honed --shape images=1,3,416,416 --profile board.toml""",
    )
    compile_.add_argument("file", metavar="FILE", type=Path, help="an ONNX file")
    compile_.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help="the file to write")
    _add_options(compile_)
    limits = Limits()
    compile_.add_argument(
        "--time-limit",
        metavar="S",
        type=seconds,
        default=limits.compile_seconds,
        help=f"seconds before the compiler is stopped (default {limits.compile_seconds:g})",
    )
    compile_.add_argument(
        "--memory-limit",
        metavar="MIB",
        type=count,
        default=limits.compile_memory_mib,
        help=f"memory the compiler may use, MiB (default {limits.compile_memory_mib})",
    )


def define_demo(demo: Parser) -> None:
    """Define the arguments of `hone demo`."""
    define(
        demo,
        _demo,
        details="lightglue matches the keypoints of two images; its weights are random but seeded.",
        examples="hone demo lightglue -o lightglue.onnx\nhone demo lightglue -o small.onnx --keypoints 64",
    )
    demo.add_argument("model", choices=("lightglue",), help="which model")
    demo.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="the file to write")
    demo.add_argument("--keypoints", metavar="N", type=count, help="keypoints of each image (default 192)")
    demo.add_argument("--symbolic", action="store_true", help="leave the number of keypoints open")
    demo.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")


def _compile(arguments: argparse.Namespace, output: Output) -> None:
    job = _fit_job(arguments.file, arguments).derive(
        Compile, "sizes", "keep_slower", "existing_build", "records", output=arguments.output
    )
    limits = dataclasses.replace(
        Limits(), compile_seconds=arguments.time_limit, compile_memory_mib=arguments.memory_limit
    )
    compiled = compiler.run(job, f"compile {arguments.file.name}", limits)
    output.emit(compiled, lambda console: _print_compiled(console, compiled))


def _print_compiled(console: Console, done: CompileDone) -> None:
    line(
        console,
        f"{done.output} is written: {done.kernels} kernels, {done.launches} launches an inference, "
        f"compiled in {done.seconds:.1f} s.",
    )
    proof = done.proof
    where = f"on {proof.device}" if proof.device else "not run yet: it is checked when it is added"
    rows = [("computes in", done.precision), *((("", done.why),) if done.why else ())]
    rows += [("proof", f"{proof.probes} inputs against {proof.reference}, {where}")]
    for name, error in proof.error.items():
        allowed = proof.tolerance[name]
        rows.append(("", f"{name}: error {error:.2g} of the largest value, allowed {allowed:.2g}"))
    rows += [("note", note) for note in done.notes]
    console.print(fields(rows))


def _demo(arguments: argparse.Namespace, output: Output) -> None:
    if arguments.symbolic and arguments.keypoints is not None:
        raise UsageError("--symbolic leaves the number of keypoints open; leave out --keypoints")
    job = Demo(
        model=arguments.model, output=arguments.output, symbolic=arguments.symbolic, seed=arguments.seed
    )
    if arguments.keypoints is not None:
        job = dataclasses.replace(job, keypoints=arguments.keypoints)
    done = compiler.run(job, f"demo {arguments.model}")
    output.say(done, f"{done.output} is written; serve it with: hone add {done.output}")


def define_fit(fit: Parser) -> None:
    """Define the arguments of `hone fit`."""
    define(
        fit,
        _fit,
        details=(
            "It takes seconds: nothing is added, and no kernel is built. Only adding tells which engine is "
            "faster. The exit status is 1 if a file would not be served."
        ),
        examples="""\
            hone fit detector.onnx
            hone fit yolox.onnx --shape images=1,3,416,416
            hone fit *.onnx --json""",
    )
    fit.add_argument("files", metavar="FILE", type=Path, nargs="+", help="an ONNX file")
    _add_options(fit)


def _add_options(parser: Parser) -> None:
    add_compile_options(parser)
    parser.add_argument("--profile", metavar="FILE", type=Path, help="device profile to compile for")
    parser.add_argument(
        "--device", metavar="SPEC", help="OpenCL device to compile for: a number or part of its name"
    )


def _fit(arguments: argparse.Namespace, output: Output) -> int:
    if len(arguments.files) > 1 and arguments.shape:
        raise UsageError("--shape is of one model, and several are given; look at that one by itself")
    lines: list[dict[str, object]] = []
    served = True
    for file in arguments.files:
        try:
            found = compiler.run(_fit_job(file, arguments), f"fit {file.name}")
        except HonedError as error:
            if len(arguments.files) == 1:
                raise
            served = False
            lines.append({"file": str(file), "error": str(error)})
            if not output.json:
                output.say({}, f"{file}: would not be served: {error}")
            continue
        served = served and _serves(found)
        lines.append({"file": str(file), "served": _serves(found), **to_plain(found)})
        if not output.json:
            output.emit(found, lambda console, f=file, found=found: _print(console, f, found))  # type: ignore[misc]
    if output.json:
        output.emit({"files": lines}, lambda _: None)
    return int(not served)


def _fit_job(file: Path, arguments: argparse.Namespace) -> Fit:
    return Fit(
        file=file,
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        profile=arguments.profile,
        device=arguments.device,
    )


def _serves(fit: Fitted) -> bool:
    return not fit.reasons or fit.cpu_engine


def _print(console: Console, file: Path, fit: Fitted) -> None:
    console.print(fields([
        ("file", str(file)),
        ("served", _verdict(fit)),
        ("inputs", "; ".join(fit.inputs)),
        ("outputs", "; ".join(fit.outputs)),
        ("size", bytes_text(fit.nbytes)),
    ]))  # fmt: skip
    console.print()
    console.print(table(("part", ">nodes", ">operations", "why"), map(_row, fit.parts)))
    for reason in fit.reasons:
        line(console, f"not compiled: {reason}")
    for note in fit.notes:
        line(console, f"note: {note}")


def _verdict(fit: Fitted) -> str:
    if not _serves(fit):
        return "no: nothing of it is compiled, and the CPU engine is not installed (honed-cpu)"
    if fit.reasons:
        return "by the CPU engine alone"
    if len(fit.parts) > 1:
        compiled = sum(part.flops for part in fit.parts if part.engine == "gpu")
        share = compiled / max(1, sum(part.flops for part in fit.parts))
        return f"in {len(fit.parts)} parts, {share:.1%} of the operations compiled"
    at_once = ", by the CPU engine until it is" if fit.cpu_engine else ""
    return f"compiled whole{at_once}"


def _row(part: FittedPart) -> tuple[str, ...]:
    whys = [*part.why, *(["compiled for sizes once it meets them"] if part.sized else [])]
    return (
        engine_name(part.engine),
        str(part.nodes),
        f"{part.flops:,}" if part.flops else "-",
        "; ".join(whys),
    )
