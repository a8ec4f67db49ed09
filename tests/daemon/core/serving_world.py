"""A made-up world around the serving machine: it does what the machine wants done, and keeps count."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from honed.daemon.core import messages as do
from honed.daemon.core import messages as told
from honed.daemon.core.machine import Machine
from honed.daemon.core.model import CPU_ENGINE, RUNS_AT_ONCE, ServedModel, State, cpu_engine, is_cpu
from honed.daemon.core.queue import ClientId, EmptyAxes, Ticket
from honed.daemon.core.state import Registry
from honed.daemon.serving.selection import cpu_serves
from honed.daemon.store.compiled import Interface
from honed.daemon.store.files import StoredFile
from honed.daemon.store.names import is_variant, model_of
from honed.daemon.store.store import EngineTimes, Manifest, begin, new_version, version_file
from honed.daemon.store.versions import NO_HISTORY, go_back, settle, succeed
from honed.protocol.errors import NotLoaded, OutOfMemory
from honed.protocol.results import ModelChecked
from honed.runtime.errors import HonedError, InvalidArgument, PreconditionBroken

T = TypeVar("T")
CLIENT = ClientId(user=1, connection=1)
USER = 7
USERS_ENGINE = cpu_engine(USER)
ISOLATING = cpu_engine(None, isolated=True)
USERS_ISOLATING = cpu_engine(USER, isolated=True)
DEVICES = ("gpu", "spare", "cpu")
CPU_ENGINES = (CPU_ENGINE, USERS_ENGINE, ISOLATING, USERS_ISOLATING)
COMPILED = cast(Any, "a compiled model")
CHECKED = ModelChecked(device="", outputs=())
ROLLED_BACK = re.compile(r"model (.*): version (\d+) is rolled back to (\d+) ")


def owner_of(name: str) -> int | None:
    """The user whose own a model of this name is."""
    return USER if model_of(name) == "own" else None


def stored(key: str) -> StoredFile:
    return StoredFile(name="m.honed", sha256=key, nbytes=1)


def manifest(name: str, key: str) -> Manifest:
    return Manifest(
        name=name,
        added=0.0,
        compiled=stored(key),
        history=begin(stored(key), schedules=key, why="added", now=0.0),
        sources=(),
        shapes={},
        precision="auto",
        owner=owner_of(name),
    )


def given(name: str) -> Manifest:
    """As it was given, before it is compiled."""
    source = StoredFile(name="m.onnx", sha256=f"source of {model_of(name)}", nbytes=1)
    return dataclasses.replace(
        manifest(name, ""),
        compiled=None,
        history=NO_HISTORY,
        sources=(source,),
        interface=Interface(inputs=(), outputs=(), opset=17, producer=""),
    )


def successor(model: ServedModel, key: str) -> Manifest:
    """As it is stored before it is served."""
    history = model.manifest.history
    version = new_version(stored(key), history.next_number, schedules=key, why="", now=1.0, settled=False)
    changed = succeed(history, version, 1.0, keep=True)
    return dataclasses.replace(model.manifest, compiled=stored(key), history=changed)


class World:
    """What the machine acts on, as far as it can be wrong: workers, clients, and the disk."""

    def __init__(
        self,
        fallback: str = "",
        disk: dict[str, Manifest] | None = None,
        numbers: Iterator[int] | None = None,
        *,
        cpu: bool = False,
    ) -> None:
        """`cpu`: the CPU engine is installed."""
        self.machine = Machine(Registry(), ("gpu", "spare"), fallback, max_queue=6, cpu=cpu)
        self.has_cpu = cpu
        self.disk = disk if disk is not None else {}
        self.now = 100.0
        self.driver = 1
        self.workers: dict[str, int] = {}  # engines with one that calls reach
        self.starts = 0
        self.dying: set[str] = set()  # engines whose worker failed, and its end is not told yet
        self.stopped = {"cpu", *CPU_ENGINES}  # engines whose worker nobody keeps
        self.loaded: dict[str, set[str]] = {name: set() for name in (*DEVICES, *CPU_ENGINES)}  # keys
        self.running: list[do.Run] = []  # those begun last at the end
        self.ended: set[tuple[str, int]] = set()  # runs that are to end, as nobody waits for them
        self.loads: list[do.Load] = []
        self.proves: list[do.VerifyProbe] = []
        self.judges: list[do.CompareCanary] = []
        self.persists: list[do.Persist] = []
        self.compares: list[do.CompareEngines] = []
        self.stops: list[do.StopServer] = []
        self.done: list[do.Action] = []
        self.outstanding: set[int] = set()  # requests
        self.answers: dict[int, HonedError | None] = {}
        self.stopping = False  # the service: nobody waits for anything
        self.condemned: set[tuple[str, int]] = set()  # models' versions that did wrong
        self.numbers = numbers or itertools.count(1)
        for kept in self.disk.values():
            assert kept.compiled is None or not kept.history.current.quarantine, "it leads to what did wrong"
            self.serve(kept, None, rests=is_variant(kept.name) and kept.compiled is not None)

    def serve(self, kept: Manifest, proof: told.LoadReport | None, *, rests: bool = False) -> None:
        """Tell of what is stored, as the service does."""
        compiled = COMPILED if kept.compiled is not None else None
        cpu = cpu_serves(kept, "fastest")
        event = told.Added(
            manifest=kept, compiled=compiled, preferred_engine="gpu", proof=proof, cpu=cpu, rests=rests
        )
        self.tell(event)

    @property
    def runs(self) -> dict[str, do.Run]:
        """What each engine began last, and still runs."""
        return {run.engine: run for run in self.running}

    @property
    def models(self) -> Registry:
        return self.machine.models

    def tell(self, event: told.Event) -> list[do.Action]:
        found = self.machine.handle(event, self.now, self.now)
        for action in found:
            self.perform(action)
        self.done += found
        return found

    def perform(self, action: do.Action) -> None:
        match action:
            case do.Run():
                self.run(action)
            case do.EndRun(engine, request):
                assert request not in self.outstanding, "somebody waits for it"
                self.ended.add((engine, request))
            case do.Answer():
                self.end(action.request, None)
            case do.Refuse():
                self.end(action.request, action.error)
            case do.Load():
                self.load(action)
            case do.VerifyProbe():
                self.proves.append(action)
            case do.Unload(engine, key):
                self.unload(engine, key)
            case do.CompareCanary():
                self.judges.append(action)
            case do.Persist():
                self.persists.append(action)
            case _:
                self.perform_other(action)

    def perform_other(self, action: do.Action) -> None:
        match action:
            case do.CompareEngines(model):
                assert self.has_cpu
                assert model.compiled is not None
                assert not model.manifest.decision.pinned_engine, "there is nothing to choose"
                assert model.number not in {compare.model.number for compare in self.compares}
                self.compares.append(action)
            case do.Log(sentence):
                if rolled_back := ROLLED_BACK.match(sentence):
                    name, left, served = rolled_back.groups()
                    assert left != served
                    self.condemned.add((name, int(left)))
            case do.Kill(engine):
                self.break_worker(engine)
            case do.StartServer(engine):
                self.stopped.remove(engine)
            case do.StopServer(engine):
                used = (model.deployments.get(engine) for model in self.models.all())
                assert self.machine.engines[engine].stops_when_unused or not any(used)
                assert not self.machine.engines[engine].queue.models()
                assert action not in self.stops
                self.stops.append(action)

    def run(self, action: do.Run) -> None:
        engine, ticket, model = action.engine, action.ticket, action.model
        assert engine in self.workers
        beside = [run for run in self.running if run.engine == engine]
        assert self.may_begin(engine, model, beside)
        assert ticket.number in self.outstanding
        assert self.models.serves(model)
        assert engine == self.machine.engine_for(model, ticket).name
        assert model.key_on(engine) in self.loaded[engine], "only what it has and found right"
        condemned = (model.name, model.manifest.history.number) in self.condemned
        assert is_cpu(engine) or not condemned, "what did wrong never serves again"
        self.running.append(action)

    def load(self, action: do.Load) -> None:
        if action.engine in self.dying:  # which the machine has yet to learn
            return
        assert action.engine in self.workers
        assert action.deployment not in {load.deployment for load in self.loads}
        assert "isolated" not in action.engine or self.machine.engines[action.engine].all_long
        self.loads.append(action)

    def unload(self, engine: str, key: str) -> None:
        """A run may not have reached the worker yet: its data is mapped there first."""
        needed = [run for run in self.running if run.engine == engine and run.model.key_on(engine) == key]
        assert not needed, "a run needs it"
        self.loaded[engine].discard(key)

    def may_begin(self, engine: str, model: ServedModel, beside: list[do.Run]) -> bool:
        """Whether an engine may begin a run of a model beside these."""
        if "isolated" in engine and any(load.engine == engine for load in self.loads):
            return False
        if not beside:
            return True
        running = self.machine.engines[engine].running
        long = all(running[run.ticket.number].long for run in beside)
        others = all(run.model is not model for run in beside)
        many = is_cpu(engine) and len(beside) < RUNS_AT_ONCE
        return many and long and others

    def end(self, request: int, error: HonedError | None) -> None:
        assert request in self.outstanding, "answered once"
        self.outstanding.remove(request)
        self.answers[request] = error

    # What may happen

    def ready(self, engine: str) -> None:
        """A worker has started, after the end of the one before was told."""
        if engine in self.dying:
            self.lose(engine)
        if engine in self.workers or engine in self.stopped or engine not in self.machine.engines:
            return
        self.starts += 1
        self.workers[engine] = self.starts
        self.loaded[engine] = set()
        self.tell(
            told.WorkerReady(
                engine=engine,
                worker=self.starts,
                spec=f"the {engine}",
                family="gpu",
                fingerprint=f"{engine} of {self.driver}",
            )
        )

    def lose(self, engine: str, *, outside: bool = False, failed: bool = False) -> None:
        """A worker ends, or did not start: calls fail before that is told."""
        if failed and engine in self.dying:
            self.lose(engine)
        if engine in self.stopped or engine not in self.machine.engines:
            return
        self.workers.pop(engine, None)
        self.loaded[engine] = set()
        while engine in self.runs:
            self.end_run(engine, "broken")
        for load in [each for each in self.loads if each.engine == engine]:
            self.loads.remove(load)
            self.tell(told.LoadCrashed(load.deployment, "it crashed", in_builder=False))
        self.proves = [each for each in self.proves if each.engine != engine]
        self.dying.discard(engine)
        self.tell(told.WorkerLost(engine=engine, reason="it crashed", from_outside=outside, failed=failed))

    def break_worker(self, engine: str) -> None:
        """Calls do not reach it any more."""
        if self.workers.pop(engine, None) is not None:
            self.dying.add(engine)

    def add(self, name: str, *, proven: bool = False) -> None:
        """Stored first, then served."""
        kept = manifest(name, f"{name}{next(self.numbers)}")
        proof = self.prove("gpu", kept.compiled.sha256) if proven else None
        self.disk[name] = kept
        self.condemned = {each for each in self.condemned if each[0] != name}
        self.persists = [each for each in self.persists if each.model.name != name]
        self.serve(kept, proof)

    def add_given(self, name: str, *, proven: bool = False) -> None:
        """The CPU engine tried it out, and it is stored as it was given."""
        if not self.has_cpu:
            return
        kept = given(name)
        proof = None
        cpu = self.machine.cpu_of(kept.owner)
        assert cpu is not None
        self.tell(told.FileRetained(cpu.name, kept.source_key))
        if proven:
            proof = self.prove(cpu.name, kept.source_key)
        self.disk[name] = kept
        self.condemned = {each for each in self.condemned if each[0] != name}
        self.persists = [each for each in self.persists if each.model.name != name]
        self.serve(kept, proof)
        self.tell(told.FileReleased(cpu.name, kept.source_key))

    def compile(self, name: str, chosen: str, *, stored_only: bool = False) -> None:
        """What was given is compiled, proven on the device, and compared with the CPU engine."""
        model = self.models.find(name)
        if model is None or model.manifest.compiled is not None:
            return
        key = f"{name}{next(self.numbers)}"
        self.tell(told.FileRetained("gpu", key))
        proof = self.prove("gpu", key)
        if proof is not None:
            history = begin(stored(key), schedules=key, why="added", now=self.now)
            kept = dataclasses.replace(model.manifest, compiled=stored(key), history=history)
            kept = self.disk[name] = kept.with_decision(chosen=chosen, reason="compared")
            self.persists = [each for each in self.persists if each.model.name != name]
            if not stored_only:
                self.serve(kept, proof)
        self.tell(told.FileReleased("gpu", key))

    def end_compare(self, compare: do.CompareEngines, chosen: str) -> None:
        """Both engines took turns, or "": one of them could not."""
        self.compares.remove(compare)
        number = compare.model.number
        if not chosen:
            self.tell(told.EnginesNotCompared(number))
            return
        device, runtime = (
            self.machine.engines[name].fingerprint for name in ("gpu", compare.model.cpu_engine)
        )
        times = EngineTimes(gpu_ms=1.0, cpu_ms=1.0, device=device, runtime=runtime)
        self.tell(told.EngineChosen(model=number, engine=chosen, why="compared", times=times))
        decision = compare.model.manifest.decision
        assert not (decision.pinned_engine and decision.reason == "compared")

    def pin_engine(self, name: str, engine: str) -> None:
        """By hand; "" lets it go."""
        model = self.models.find(name)
        if model is None or model.compiled is None or not model.can_run_on_cpu or not self.has_cpu:
            return
        serves = engine or ("cpu" if model.on_cpu else "gpu")
        self.tell(told.EngineChosen(model=model.number, engine=serves, why="pinned", pinned=engine))

    def prove(self, engine: str, key: str) -> told.LoadReport | None:
        worker = self.workers.get(engine)
        if worker is None:
            return None
        self.loaded[engine].add(key)
        return told.LoadReport(engine=engine, worker=worker, checked=CHECKED)

    def publish(self, name: str, *, stored_only: bool = False) -> None:
        """A better version, loaded beside the present one and stored; it may never come to serve."""
        model = self.models.find(name)
        if model is None or not model.on_preferred_engine or not model.on_device or model.compiled is None:
            return
        key = f"{name}{next(self.numbers)}"
        self.tell(told.FileRetained("gpu", key))
        proof = self.prove("gpu", key)
        if proof is not None and model.state is State.READY:
            made = successor(model, key)
            self.disk[name] = made
            if not stored_only:
                event = told.SuccessorReady(model=model.number, manifest=made, compiled=COMPILED, proof=proof)
                self.tell(event)
        self.tell(told.FileReleased("gpu", key))

    def choose(self, name: str) -> None:
        """A user goes back to the first version that is kept."""
        model = self.models.find(name)
        if model is None or model.manifest.compiled is None:
            return
        history = model.manifest.history
        target = next(v for v in history.versions if v.kept)
        if target is history.current:
            return
        file = version_file(model.manifest, target)
        self.tell(told.FileRetained("gpu", file.sha256))
        proof = self.prove("gpu", file.sha256)
        if proof is not None:
            changed = settle(go_back(history, target.number, "by hand", "by hand", 2.0))
            made = dataclasses.replace(model.manifest, compiled=file, history=changed)
            self.disk[name] = made
            self.condemned.discard((name, target.number))
            self.tell(told.VersionChosen(manifest=made, compiled=COMPILED, proof=proof))
        self.tell(told.FileReleased("gpu", file.sha256))

    def remove(self, name: str) -> None:
        if name in self.disk:
            del self.disk[name]
            self.condemned = {each for each in self.condemned if each[0] != name}
            self.tell(told.Removed(name))

    def rest(self, name: str) -> None:
        """A variant is taken out of service where it has nothing to do."""
        model = self.models.find(name)
        if model is None or not is_variant(name):
            return
        held = {deployment.number for deployment in model.deployments.values()}
        self.tell(told.SuspendRequested(name))
        if self.models.is_suspended(model):
            assert not any(run.model is model for run in self.runs.values())
            assert not any(load.deployment in held for load in self.loads)

    def wake(self, name: str) -> None:
        """One that rests is asked for."""
        if name in self.disk and self.models.find(name) is None:
            self.serve(self.models.entry(name).manifest, None)

    def ask(
        self, name: str, *, is_open: bool = False, empty: EmptyAxes = None, held: bool = False
    ) -> int | None:
        """The request's number, None where it is refused at once; `is_open`: in shapes of its own."""
        model = self.models.find(name)
        if is_open and (model is None or not model.can_run_on_cpu or not self.has_cpu):
            return None
        number = next(self.numbers)
        self.outstanding.add(number)
        ticket = Ticket(
            number=number,
            client=CLIENT,
            model=name,
            priority=2,
            arrived=self.now,
            deadline=self.now + 1e6,
            needs_cpu_engine=is_open,
            empty=empty,
            held=held,
        )
        try:
            self.tell(told.RequestArrived(ticket))
        except HonedError:
            self.outstanding.remove(number)
            return None
        return number

    def leave(self, request: int) -> None:
        self.outstanding.remove(request)
        self.tell(told.ClientGaveUp(request))

    def end_run(self, engine: str, how: str) -> None:
        run = self.runs.get(engine)
        if run is None:
            return
        if how == "lasts":
            self.tell(told.RunLasts(engine, run.ticket.number))
            return
        self.running.remove(run)
        number = run.ticket.number
        match how:
            case "well" | "more":
                self.tell(told.RunSucceeded(engine, number, more=how == "more"))
            case "unfit" | "values" | "not loaded" | "no memory":
                self.reject(run, how)
            case "broken":
                self.break_worker(engine)
                self.tell(told.WorkerFailed(engine, number, "it crashed", device=False))
            case "device":
                self.tell(told.WorkerFailed(engine, number, "out of memory", device=True))
            case "not run":  # nothing is told until the end of the worker is
                self.break_worker(engine)

    def reject(self, run: do.Run, how: str) -> None:
        """A run ends without an answer, in a worker that goes on."""
        engine, number = run.engine, run.ticket.number
        errors: dict[str, HonedError] = {"unfit": InvalidArgument("not finite")}
        if is_cpu(engine):
            errors["no memory"] = OutOfMemory("it may have 180 MiB")
        else:
            errors["values"] = PreconditionBroken("it has other values")
        if how == "not loaded":  # it had to make room
            self.loaded[engine].discard(run.model.key_on(engine))
            errors[how] = NotLoaded("it is not loaded")
        if (error := errors.get(how)) is None:
            self.tell(told.RunSucceeded(engine, number))
        else:
            self.tell(told.RequestRejected(engine, number, error))

    def end_load(self, load: do.Load, how: str) -> None:
        self.loads.remove(load)
        match how:
            case "well" | "left":
                proof = self.prove(load.engine, load.model.key_on(load.engine))
                assert proof is not None
                proof = dataclasses.replace(proof, left=(1, 2) if how == "left" else ())
                self.tell(told.Loaded(load.deployment, load.model.key, proof))
            case "refused" | "short":
                key = load.model.key_on(load.engine)
                self.loaded[load.engine].add(key)  # to be checked
                why, short = "wrong answers", how == "short"
                self.tell(told.LoadRefused(load.deployment, load.engine, key, why, short))
            case "apart":
                self.tell(told.LoadCrashed(load.deployment, "the builder crashed", in_builder=True))

    def end_prove(self, prove: do.VerifyProbe, *, right: bool) -> None:
        self.proves.remove(prove)
        if right:
            self.tell(told.ProbePassed(prove.deployment, ()))
        else:
            self.tell(told.ProbeFailed(prove.deployment, "wrong answers"))

    def judge(self, judge: do.CompareCanary, how: str) -> None:
        self.judges.remove(judge)
        if how == "broken":
            self.tell(told.CanaryComparisonCrashed(judge.model.number, "it crashed"))
        else:
            self.tell(told.CanaryCompared(judge.model.number, "it is slower" if how == "slower" else ""))

    def persist(self, action: do.Persist) -> None:
        self.persists.remove(action)
        if self.models.keeps(action.model):
            self.disk[action.model.name] = action.model.manifest

    def stop(self, action: do.StopServer) -> None:
        self.stops.remove(action)
        self.workers.pop(action.engine, None)
        self.dying.discard(action.engine)
        self.stopped.add(action.engine)
        for load in [each for each in self.loads if each.engine == action.engine]:
            self.loads.remove(load)
        self.tell(told.ServerStopped(action.engine))

    def settle(self) -> None:
        """Whatever can end well does, until nothing is left to do."""
        for _ in range(1000):
            for engine in sorted(self.machine.engines):
                self.ready(engine)
                while engine in self.runs:
                    self.end_run(engine, "well")
            for load in list(self.loads):
                if load in self.loads:
                    self.end_load(load, "well")
            for prove in list(self.proves):
                self.end_prove(prove, right=True)
            for judge in list(self.judges):
                self.judge(judge, "well")
            for persist in list(self.persists):
                self.persist(persist)
            for stop in list(self.stops):
                self.stop(stop)
            for compare in list(self.compares):
                self.end_compare(compare, "gpu")
            busy = (
                *(self.runs, self.loads, self.proves, self.judges),
                *(self.persists, self.stops, self.compares),
            )
            starting = set(self.machine.engines) - set(self.workers) - self.stopped
            if not any(busy) and not starting:
                return
        raise AssertionError("it never comes to rest")
