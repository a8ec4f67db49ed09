"""`python -m honed.tuner compile | tune | tasks | records | demo`: a child that says JSON lines on stdout."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from honed.runtime.errors import HonedError, InvalidArgument, ModelRefused
from honed.runtime.model import Launch

from . import records_command
from .shapes import parse_shapes
from .tune import command as tuning

Emit = Callable[[dict[str, Any]], None]
MOST_PROCESSES = 4  # that lower a model's functions: each has a share of TVM's memory of its own


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 done, 1 refused or failed, 2 used wrongly."""
    arguments = _parser().parse_args(argv)
    if arguments.memory_mib:
        limit_memory(arguments.memory_mib)
    emit = _emitter()
    try:
        arguments.run(arguments, emit)
    except ModelRefused as refused:
        event: dict[str, Any] = {
            "event": "refused",
            "message": str(refused),
            "reasons": list(refused.reasons),
        }
        locations = getattr(refused, "locations", ())
        emit(event | ({"external_data": list(locations)} if locations else {}))
        return 1
    except HonedError as error:
        emit({"event": "error", "code": error.code, "message": str(error)})
        return 1
    except MemoryError:
        emit({
            "event": "error",
            "code": "RESOURCE_EXHAUSTED",
            "message": f"compiling needs more than the {arguments.memory_mib} MiB allowed; raise the limit",
        })  # fmt: skip
        return 1
    return 0


def limit_memory(mib: int) -> None:
    """Bound what this process and its children may write to.

    RLIMIT_DATA and not RLIMIT_AS: OpenCL drivers reserve address space far beyond what they use. A lower
    limit that the spawner has set stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m honed.tuner", description=__doc__)
    limits = argparse.ArgumentParser(add_help=False)
    limits.add_argument("--memory-mib", type=int, default=0, help="limit of memory, in MiB")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compile_ = commands.add_parser("compile", parents=[limits], help="compile an ONNX file to a .honed file")
    compile_.set_defaults(run=_compile)
    compile_.add_argument("file", type=Path)
    compile_.add_argument("-o", "--output", type=Path, required=True)
    compile_.add_argument("--shape", action="append", default=[], metavar="INPUT=1,3,224,224")
    compile_.add_argument("--precision", choices=("auto", "fp32", "fp16"), default="auto")
    compile_.add_argument("--calibration", type=Path, help="folder of inputs to measure errors in fp16 on")
    compile_.add_argument("--like", type=Path, help="take the choice of precision of this compiled form")
    compile_.add_argument("--profile", type=Path, help="compile for the device of this profile file")
    compile_.add_argument("--device", help="compile for, and compare on, this OpenCL device")
    compile_.add_argument("--records", type=Path, help="use the best schedules of this file of records")
    compile_.add_argument("--check", action="store_true", help="find out whether it can be compiled, and end")
    compile_.add_argument("--name", help="the file's name as the user knows it")
    tuning.add_commands(commands, [limits])
    records_command.add_commands(commands, [limits])
    demo = commands.add_parser("demo", parents=[limits], help="write a demo model")
    demo.set_defaults(run=_demo)
    demo.add_argument("model", choices=("lightglue",))
    demo.add_argument("-o", "--output", type=Path, required=True)
    demo.add_argument("--keypoints", type=int, default=192)
    demo.add_argument("--symbolic", action="store_true", help="leave the number of keypoints open")
    demo.add_argument("--seed", type=int, default=0)
    return parser


def _emitter() -> Emit:
    """Keeps standard output for events: libraries that print there are sent to standard error."""
    events: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    return emit


def _compile(arguments: argparse.Namespace, emit: Emit) -> None:
    emit({"event": "stage", "stage": "check", "fraction": 0.0, "text": "start the compiler"})
    from honed.runtime import devices, profilefile

    from .compile import Request, check_file, compile_file

    if arguments.profile and not arguments.device:
        profile, device = profilefile.load(arguments.profile), None
    else:
        device = devices.select(arguments.device)
        profile = profilefile.load(arguments.profile) if arguments.profile else device.profile
    request = Request(
        path=arguments.file,
        output=arguments.output,
        profile=profile,
        device=device,
        shapes=parse_shapes(arguments.shape),
        precision=arguments.precision,
        filename=arguments.name or arguments.file.name,
        records=arguments.records,
        calibration=arguments.calibration,
        like=arguments.like,
        processes=min(MOST_PROCESSES, len(os.sched_getaffinity(0))),
    )
    started = time.monotonic()

    def report(stage: str, fraction: float, text: str) -> None:
        emit({"event": "stage", "stage": stage, "fraction": round(fraction, 4), "text": text})

    if arguments.check:
        check_file(request, report)
        emit({"event": "done"})
        return
    compiled = compile_file(request, report)
    model, proof = compiled.model, compiled.model.proof
    assert proof is not None
    launches = [step for step in model.steps if isinstance(step, Launch)]
    emit({
        "event": "done",
        "output": str(request.output),
        "sha256": model.source.sha256,
        "precision": model.source.precision,
        "why": model.source.choice.why if model.source.choice else "",
        "notes": list(model.source.notes),
        "fell_back": compiled.fell_back,
        "kernels": len({launch.kernel for launch in launches}),
        "launches": len(launches),
        "seconds": round(time.monotonic() - started, 2),
        "proof": {
            "reference": proof.reference,
            "probes": len(proof.probes),
            "device": proof.device,
            "error": dict(zip((o.name for o in model.outputs), proof.error, strict=False)),
            "tolerance": dict(zip((o.name for o in model.outputs), proof.probes[0].tolerance, strict=True)),
        },
    })  # fmt: skip


def _demo(arguments: argparse.Namespace, emit: Emit) -> None:
    emit({"event": "stage", "stage": "write", "fraction": 0.0, "text": f"write {arguments.output}"})
    from .demo import lightglue

    started = time.monotonic()
    try:
        lightglue.write(arguments.output, arguments.keypoints, arguments.symbolic, arguments.seed)
    except OSError as error:
        raise InvalidArgument(f"cannot write {arguments.output}: {error.strerror}") from error
    emit({
        "event": "done",
        "output": str(arguments.output),
        "seconds": round(time.monotonic() - started, 2),
    })  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
