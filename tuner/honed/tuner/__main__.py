"""`python -m honed.tuner`: a child that does one of `honed.jobs.commands`, and tells its events on stdout."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from honed.jobs import commands, events
from honed.jobs.events import News, Result, Stage
from honed.process.children import answering, tell_again
from honed.process.limits import data_is_short, limit_data, out_of_memory
from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument, ResourceExhausted
from honed.protocol.values import OptimisationCheck
from honed.runtime.compiled.model import Launch

if TYPE_CHECKING:
    from .compiler.compile import CompileRequest

Emit = Callable[[News], None]
MOST_PROCESSES = 4  # Processes that lower a model's functions: each needs its own share of memory for TVM
_SHARE_MIB = 320  # Memory of each process in MiB
_LEAST_GARBAGE = 50_000  # Growth in objects that starts a garbage collection; Python's 700 cost 2 %


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 done, 1 refused or failed, 2 used wrongly."""
    job: commands.Job[Any] | InvalidArgument
    try:
        job = commands.parse(sys.argv[1:] if argv is None else argv, __doc__ or "")
    except InvalidArgument as error:
        job = error
    with answering() as say:
        try:
            if isinstance(job, InvalidArgument):
                raise job
            say(events.to_map(_result(job, lambda news: say(events.to_map(news)))))
        except HonedError as error:
            say(events.to_map(error))
            return 1
    return 0


def _result(job: commands.Job[Any], emit: Emit) -> Result:
    """Run a job and return its result; raise ResourceExhausted where memory is short."""
    if job.memory_mib:
        limit_data(job.memory_mib << 20)
    do = _WORK.get(type(job)) or commands.extension(job.command[0])[type(job)]
    try:
        if isinstance(do, str):
            module, _, name = do.partition(":")
            do = getattr(importlib.import_module(module, "honed.tuner"), name)
        result: Result = do(job, emit)
        return result
    except HonedError:
        raise
    except Exception as error:
        # TVM and ONNX raise their own errors for lack of memory, and Python may raise anything.
        if out_of_memory(error) or data_is_short():
            raise ResourceExhausted(_needs_more_memory(job.memory_mib)) from error
        raise


def _needs_more_memory(limit_mib: int) -> str:
    if limit_mib:
        return f"compiling needs more than the {limit_mib} MiB allowed; raise the limit"
    return "compiling needs more memory than this machine has to give; free some, or compile on a larger one"


def _compilation(job: commands.Check | commands.Fit) -> commands.Compile:
    return job.derive(commands.Compile, "sizes", "keep_slower", "existing_build", "records", output=job.file)


def _check(job: commands.Check, emit: Emit) -> events.Done:
    request = _request(_compilation(job), emit)
    from .compiler.compile import check_file

    check_file(request, _reporting(emit))
    return events.Done()


def _fit(job: commands.Fit, emit: Emit) -> events.Fitted:
    request = _request(_compilation(job), emit)
    from .compiler.compile import fit_file

    return fit_file(request)


def _check_optimisations(job: commands.CheckOptimisations, emit: Emit) -> OptimisationCheck:
    from .verify import levels
    from .verify.confined import DEFAULT_LIMITS

    most = min(DEFAULT_LIMITS.memory_bytes, job.memory_mib << 20 or DEFAULT_LIMITS.memory_bytes)
    limits = replace(DEFAULT_LIMITS, memory_bytes=most, threads=job.threads or DEFAULT_LIMITS.threads)
    if job.half is None:
        return levels.of_file(job.file, job.shapes, limits)
    import onnx

    from .frontend import load
    from .mixed_precision.choose import onnx_form

    form = onnx_form(load(job.file))
    found = levels.of_file(job.file, job.shapes, limits, form)
    onnx.save(form[0], job.half)
    return found


def _compile(job: commands.Compile, emit: Emit) -> events.CompileDone:
    request = _request(job, emit)
    from .compiler.compile import compile_file

    began = time.monotonic()
    compiled = compile_file(request, _reporting(emit))
    model, proof = compiled.model, compiled.model.proof
    assert proof is not None
    names = [output.name for output in model.outputs]
    launches = [step for step in model.steps if isinstance(step, Launch)]
    return events.CompileDone(
        output=str(request.output),
        sha256=model.source.sha256,
        precision=model.source.precision,
        why=model.source.choice.why if model.source.choice else "",
        notes=model.source.notes,
        fell_back=compiled.fell_back,
        kernels=len({launch.kernel for launch in launches}),
        launches=len(launches),
        seconds=round(time.monotonic() - began, 2),
        proof=events.ProofReport(
            reference=proof.reference,
            probes=len(proof.probes),
            device=proof.device,
            error=dict(zip(names, proof.error, strict=False)),
            tolerance=dict(zip(names, proof.probes[0].tolerance, strict=True)),
        ),
    )


def _request(job: commands.Compile, emit: Emit) -> CompileRequest:
    emit(Stage(stage="check", fraction=0.0, text="start the compiler"))
    # Importing the compiler creates only objects that stay: collecting garbage would cost a fifth of it
    gc.disable()
    from honed.machine import devices
    from honed.machine.profile import DeviceProfile

    from .compiler.compile import CompileRequest

    gc.freeze()
    gc.enable()
    gc.set_threshold(_LEAST_GARBAGE)

    if job.profile and not job.device:
        profile, device = DeviceProfile.load(job.profile), None
    else:
        device = devices.select(job.device)
        profile = DeviceProfile.load(job.profile) if job.profile else device.profile
    return strict.copy_fields(
        CompileRequest,
        job,
        path=job.file,
        profile=profile,
        device=device,
        filename=job.name or job.file.name,
        processes=min(MOST_PROCESSES, len(os.sched_getaffinity(0)), _room(job.memory_mib)),
    )


def _room(memory_mib: int) -> int:
    """Return how many processes may lower functions beside the compiler within `memory_mib`."""
    return max(0, memory_mib // _SHARE_MIB - 1) if memory_mib else MOST_PROCESSES


def _reporting(emit: Emit) -> Callable[[str, float, str], None]:
    def report(stage: str, fraction: float, text: str) -> None:
        tell_again()
        emit(Stage(stage=stage, fraction=round(fraction, 4), text=text))

    return report


def _demo(job: commands.Demo, emit: Emit) -> events.Written:
    emit(Stage(stage="write", fraction=0.0, text=f"write {job.output}"))
    from . import lightglue

    began = time.monotonic()
    try:
        lightglue.write(job.output, job.keypoints, job.symbolic, job.seed)
    except OSError as error:
        raise InvalidArgument(f"cannot write {job.output}: {error.strerror}") from error
    return events.Written(output=str(job.output), seconds=round(time.monotonic() - began, 2))


# The function for each job: one of this module, or "module:function", which only that job imports.
_WORK: dict[type, Callable[[Any, Emit], Any] | str] = {
    commands.Check: _check,
    commands.Fit: _fit,
    commands.CheckOptimisations: _check_optimisations,
    commands.Compile: _compile,
    commands.Tasks: ".tune.command:list_tasks",
    commands.Tune: ".tune.command:tune_model",
    commands.Export: ".records_command:export",
    commands.Import: ".records_command:import_",
    commands.ShowHistory: ".records_command:history",
    commands.ListFaults: ".records_command:faults",
    commands.Demo: _demo,
}


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Skips destroying the objects of TVM and the driver, which takes 0.2 s
