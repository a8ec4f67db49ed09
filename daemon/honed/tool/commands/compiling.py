"""Commands that run the compiler here, without the service: compile and demo."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Compile, Demo
from honed.jobs.events import Compiled
from honed.protocol.strict import to_plain
from honed.tool import compiler
from honed.tool.output import Console, Output, fields, line
from honed.tool.parser import (
    Parser,
    UsageError,
    add_compile_options,
    count,
    define,
    seconds,
    unique,
)


def define_compile(compile_: Parser) -> None:
    """What `hone compile` takes."""
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
    add_compile_options(compile_)
    compile_.add_argument("--profile", metavar="FILE", type=Path, help="device profile to compile for")
    compile_.add_argument(
        "--device", metavar="SPEC", help="OpenCL device to compile for: a number or part of its name"
    )
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
    """What `hone demo` takes."""
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
    job = Compile(
        file=arguments.file,
        output=arguments.output,
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        profile=arguments.profile,
        device=arguments.device,
    )
    limits = dataclasses.replace(
        Limits(), compile_seconds=arguments.time_limit, compile_memory_mib=arguments.memory_limit
    )
    compiled = compiler.run(job, f"compile {arguments.file.name}", limits)
    output.emit(to_plain(compiled), lambda console: _print_compiled(console, compiled))


def _print_compiled(console: Console, done: Compiled) -> None:
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
    output.emit(
        to_plain(done),
        lambda console: line(console, f"{done.output} is written; serve it with: hone add {done.output}"),
    )
