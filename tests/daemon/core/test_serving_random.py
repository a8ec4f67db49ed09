"""The serving state machine under any order of events, crashes of the service included."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from honed.daemon.core import messages as told
from honed.daemon.core.model import CPU_ENGINE, Phase, ServedModel, State, cpu_engine
from honed.daemon.core.queue import EmptyAxes, Ticket
from honed.daemon.store.versions import TRIAL_REQUESTS

from .serving_world import CPU_ENGINES, DEVICES, ISOLATING, USERS_ENGINE, USERS_ISOLATING, T, World, owner_of

NAMES = st.sampled_from(["a", "b", "a@2", "own"])  # the third is a variant, the last a user's own
GIVEN = st.sampled_from(["a", "b", "own"])  # what files may be called
ENGINES = st.sampled_from(["gpu", "spare"])
EVERY_ENGINE = st.sampled_from([*DEVICES, *CPU_ENGINES])
PICKS = st.integers(0, 5)


def chosen(among: list[T], pick: int) -> T:
    return among[pick % len(among)]


class Serving(RuleBasedStateMachine):
    """Any order of events."""

    world: World
    fallback: str
    cpu: bool

    @initialize(fallback=st.sampled_from(["", "spare", "cpu"]), ready=st.booleans(), cpu=st.booleans())
    def start(self, fallback: str, ready: bool, cpu: bool) -> None:
        self.fallback, self.cpu = fallback, cpu
        self.world = World(fallback, cpu=cpu)
        if ready:
            for engine in ("gpu", "spare"):
                self.world.ready(engine)
            for name in ("a", "b"):
                self.world.add(name, proven=True)
        if ready and cpu:
            self.serve_given("a", "gpu", True)

    @rule(engine=ENGINES)
    def worker_ready(self, engine: str) -> None:
        self.world.ready(engine)

    @rule()
    def stand_in_ready(self) -> None:
        self.world.ready("cpu")

    @rule()
    def cpu_engine_ready(self) -> None:
        self.world.ready(CPU_ENGINE)

    @rule()
    def users_engine_ready(self) -> None:
        self.world.ready(USERS_ENGINE)

    @rule(engine=st.sampled_from([ISOLATING, USERS_ISOLATING]))
    def isolating_engine_ready(self, engine: str) -> None:
        self.world.ready(engine)

    @rule(name=GIVEN, proven=st.booleans(), ready=st.booleans())
    def add_given(self, name: str, proven: bool, ready: bool) -> None:
        """What the CPU engine serves."""
        self.world.add_given(name, proven=proven)
        if ready:
            self.world.ready(cpu_engine(owner_of(name)))

    @rule(
        name=NAMES, chosen=st.sampled_from(["cpu", "gpu"]), stored_only=st.sampled_from([False] * 4 + [True])
    )
    def compile(self, name: str, chosen: str, stored_only: bool) -> None:
        """What was given is compiled; at times the service crashes before it is served."""
        self.world.compile(name, chosen, stored_only=stored_only)
        if stored_only:
            self.world = World(self.fallback, self.world.disk, self.world.numbers, cpu=self.cpu)

    @rule(name=GIVEN, chosen=st.sampled_from(["cpu", "gpu"]), shaped=st.booleans())
    def serve_given(self, name: str, chosen: str, shaped: bool) -> None:
        """The whole way: served as it was given, then compiled; then asked for in other shapes."""
        world = self.world
        world.add_given(name)
        for engine in (cpu_engine(owner_of(name)), "gpu"):
            self.restart(engine)
        world.compile(name, chosen)
        if shaped:
            world.ask(name, is_open=True)

    @rule(name=NAMES, count=st.integers(1, 2), empty=st.sampled_from([None, (), (("x", (0,)),)]))
    def ask_in_other_shapes(self, name: str, count: int, empty: EmptyAxes) -> None:
        for _ in range(count):
            self.world.ask(name, is_open=True, empty=empty)

    @rule(seconds=st.sampled_from([5.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.tell(told.Tick())

    @rule(pick=PICKS, engine=st.sampled_from(["gpu", "cpu", ""]))
    def end_compare(self, pick: int, engine: str) -> None:
        if self.world.compares:
            self.world.end_compare(chosen(self.world.compares, pick), engine)

    @rule(name=NAMES, engine=st.sampled_from(["gpu", "cpu", ""]))
    def pin_engine(self, name: str, engine: str) -> None:
        self.world.pin_engine(name, engine)

    @rule(engine=EVERY_ENGINE)
    def another_driver(self, engine: str) -> None:
        """It is there from the next worker on."""
        self.world.driver += 1
        if engine in self.world.workers:
            self.world.lose(engine, outside=True)
            self.world.ready(engine)

    @rule(engine=EVERY_ENGINE, outside=st.booleans())
    def worker_lost(self, engine: str, outside: bool) -> None:
        if engine in self.world.workers | dict.fromkeys(self.world.dying):
            self.world.lose(engine, outside=outside)

    @rule(engine=EVERY_ENGINE)
    def no_worker_starts(self, engine: str) -> None:
        if engine not in self.world.workers:
            self.world.lose(engine, failed=True)

    @rule(name=NAMES, proven=st.booleans())
    def add(self, name: str, proven: bool) -> None:
        self.world.add(name, proven=proven)

    @rule(name=NAMES)
    def publish(self, name: str) -> None:
        self.world.publish(name)

    @rule(name=NAMES)
    def choose(self, name: str) -> None:
        self.world.choose(name)

    @rule(rests=st.booleans(), ready=st.booleans())
    def compile_for_other_shapes(self, rests: bool, ready: bool) -> None:
        """A variant of what was given, which shares its source."""
        world = self.world
        if not world.has_cpu or "a" not in world.disk:
            return
        world.add_given("a@2")
        if ready:
            for engine in (CPU_ENGINE, "gpu"):
                self.restart(engine)
        world.compile("a@2", "gpu")
        world.ask("a@2")
        if rests:
            world.rest("a@2")

    @rule()
    def rest(self) -> None:
        self.world.rest("a@2")

    @rule()
    def wake(self) -> None:
        self.world.wake("a@2")

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.world.remove(name)

    @rule(name=NAMES, count=st.integers(1, 3))
    def ask(self, name: str, count: int) -> None:
        for _ in range(count):
            self.world.ask(name)

    @precondition(lambda self: self.world.outstanding)
    @rule(pick=PICKS)
    def leave(self, pick: int) -> None:
        self.world.leave(chosen(sorted(self.world.outstanding), pick))

    @rule(name=GIVEN, beside=st.booleans())
    def end_the_cpu_engine(self, name: str, beside: bool) -> None:
        """A request to a model ends the process, and there is another; at times others run beside it."""
        model = self.world.models.find(name)
        if model is None or not self.world.has_cpu:
            return
        engine = model.cpu_engine
        self.restart(engine)
        self.world.ask(name, is_open=True)
        if beside:
            self.world.end_run(engine, "lasts")
            for other in ("a", "b"):
                self.world.ask(other, is_open=True)
        self.world.lose(engine)
        self.restart(engine)

    @precondition(lambda self: self.world.runs)
    @rule(
        pick=PICKS,
        how=st.sampled_from(
            [
                *("well", "more", "unfit", "values", "broken", "device", "not run", "lasts"),
                *("not loaded", "no memory"),
            ]
        ),
    )
    def end_run(self, pick: int, how: str) -> None:
        self.world.end_run(chosen(sorted(self.world.runs), pick), how)

    @rule(name=NAMES)
    def serve_much(self, name: str) -> None:
        """Enough for a trial to end."""
        model = self.world.models.find(name)
        if model is None or model.state is not State.READY:
            return
        for _ in range(TRIAL_REQUESTS):
            self.world.ask(name)
            self.world.end_run(model.engine, "well")

    @rule(name=NAMES, how=st.sampled_from(["well", "slower", "broken", "crash", "later"]))
    def publish_and_judge(self, name: str, how: str) -> None:
        """The whole of a trial."""
        self.world.publish(name)
        self.serve_much(name)
        if how == "crash":
            self.world.ask(name)
            self.world.lose("gpu")
        elif self.world.judges and how != "later":
            self.world.judge(self.world.judges[-1], how)

    @rule(engine=ENGINES)
    def restart(self, engine: str) -> None:
        """Another worker, which loads everything anew."""
        if engine in self.world.workers:
            self.world.lose(engine, outside=True)
        self.world.ready(engine)
        while loads := [load for load in self.world.loads if load.engine == engine]:
            self.world.end_load(loads[0], "well")

    @rule()
    def lose_the_device(self) -> None:
        """Until it is back another may serve its models."""
        self.world.lose("gpu", outside=True)
        self.world.lose("gpu", failed=True)

    @precondition(lambda self: self.world.loads)
    @rule(pick=PICKS, how=st.sampled_from(["well", "left", "refused", "apart", "short"]))
    def end_load(self, pick: int, how: str) -> None:
        load = chosen(self.world.loads, pick)
        if load.engine in self.world.workers:
            self.world.end_load(load, how)

    @precondition(lambda self: self.world.proves)
    @rule(pick=PICKS, right=st.booleans())
    def end_prove(self, pick: int, right: bool) -> None:
        self.world.end_prove(chosen(self.world.proves, pick), right=right)

    @precondition(lambda self: self.world.judges)
    @rule(pick=PICKS, how=st.sampled_from(["well", "slower", "broken"]))
    def judge(self, pick: int, how: str) -> None:
        self.world.judge(chosen(self.world.judges, pick), how)

    @precondition(lambda self: self.world.persists)
    @rule(pick=PICKS)
    def persist(self, pick: int) -> None:
        self.world.persist(chosen(self.world.persists, pick))

    @precondition(lambda self: self.world.stops)
    @rule(pick=PICKS)
    def server_stopped(self, pick: int) -> None:
        self.world.stop(chosen(self.world.stops, pick))

    @rule(seconds=st.sampled_from([0.1, 61.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(pick=PICKS)
    def stopping(self, pick: int) -> None:
        if pick:  # seldom
            return
        self.world.stopping = True
        self.world.tell(told.Stopping())
        assert not self.world.outstanding

    @rule(name=NAMES, publishing=st.booleans())
    def crash_of_the_service(self, name: str, publishing: bool) -> None:
        """Of all there was only what is stored is left."""
        if publishing:
            self.world.publish(name, stored_only=True)
        self.world = World(self.fallback, self.world.disk, self.world.numbers, cpu=self.cpu)

    @invariant()
    def no_request_is_lost(self) -> None:
        world = self.world
        places: list[int] = []
        for engine in world.machine.engines.values():
            places += engine.queue._waiting
            running = [*engine.running.values(), *engine.fallen]
            places += [each.ticket.number for each in running if not each.abandoned]
        assert sorted(places) == sorted(world.outstanding)

    @invariant()
    def what_is_ready_is_loaded(self) -> None:
        for model in self.world.models.all():
            assert set(model.deployments) <= {
                model.engine,
                model.preferred_engine,
                *self.cpu_engines_of(model),
            }
            assert model.engine in model.deployments
            if model.deployment.state is State.READY and model.engine in self.world.workers:
                assert model.key_on(model.engine) in self.world.loaded[model.engine]
            for engine, deployment in model.deployments.items():
                if deployment.state is State.READY and engine in self.world.workers:
                    assert model.key_on(engine) in self.world.loaded[engine]
            if model.canary is not None and model.canary.before.engine in self.world.workers:
                assert model.canary.before.manifest.name == model.name

    @invariant()
    def what_nothing_uses_is_not_loaded(self) -> None:
        """But what a run or a load has there still, and what nobody can tell a worker that ended."""
        world = self.world
        for engine in world.workers:
            used = {load.model.key_on(engine) for load in world.loads if load.engine == engine}
            used |= {run.model.key_on(engine) for run in world.running if run.engine == engine}
            for model in world.models.all():
                if engine in model.deployments and model.deployments[engine].used_there:
                    used.add(model.key_on(engine))
                if model.canary is not None and model.canary.before.engine == engine:
                    used.add(model.canary.before.key_on(engine))
            assert world.loaded[engine] <= used

    def cpu_engines_of(self, model: ServedModel) -> set[str]:
        return {cpu_engine(model.manifest.owner, isolated=isolated) for isolated in (False, True)}

    @invariant()
    def what_nobody_waits_for_is_to_end(self) -> None:
        for engine in self.world.machine.engines.values():
            for number, running in engine.running.items():
                assert (
                    not running.abandoned or (engine.name, number) in self.world.ended or self.world.stopping
                )

    @invariant()
    def what_is_isolated_is_elsewhere(self) -> None:
        for model in self.world.models.all():
            shared = cpu_engine(model.manifest.owner)
            assert not model.isolated or shared not in (
                model.engine,
                model.preferred_engine,
                *model.deployments,
            )

    @invariant()
    def what_rests_takes_nothing(self) -> None:
        world = self.world
        for variant in world.models.variants():
            if not world.models.is_suspended(variant):
                continue
            assert world.models.find(variant.name) is None
            assert variant.key not in world.loaded["gpu"] or world.machine.engines["gpu"].kept[variant.key]
            assert not any(ticket.model == variant.name for ticket in self.waiting())

    def waiting(self) -> list[Ticket]:
        engines = self.world.machine.engines.values()
        return [ticket for engine in engines for ticket in engine.queue._waiting.values()]

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        world = self.world
        for engine in world.machine.engines.values():
            for ticket in engine.queue._waiting.values():
                model = world.models.get(ticket.model)
                assert engine is world.machine.engine_for(model, ticket)
                state = model.deployments[engine.name].state
                assert not model.deployments[engine.name].resting
                assert state is not State.UNAVAILABLE
                assert engine.phase not in (Phase.FAILED, Phase.RESTING)
                idle = not engine.running and engine.phase is Phase.READY
                if engine.isolating:
                    idle &= not any(load.engine == engine.name for load in world.loads)
                assert not (idle and state is State.READY), "it could run now"

    @invariant()
    def an_engine_with_something_to_load_loads(self) -> None:
        for engine in self.world.machine.engines.values():
            wanted = engine.queue.models()
            waiting = [
                model
                for model in self.world.models.all()
                if engine.name in model.deployments
                and model.deployments[engine.name].state is State.LOADING
                and not model.deployments[engine.name].resting
                and (model.engine == engine.name or model.name in wanted)
            ]
            ready = engine.phase is Phase.READY and engine.name not in self.world.dying
            if waiting and ready and (engine.all_long or not engine.isolating):
                assert any(load.engine == engine.name for load in self.world.loads)

    @invariant()
    def the_cpu_engine_runs_only_while_it_is_needed(self) -> None:
        engine = self.world.machine.engines.get(CPU_ENGINE)
        if engine is None:
            return
        used = any(CPU_ENGINE in (*m.deployments, m.preferred_engine) for m in self.world.models.all())
        if not used and not engine.running and not engine.fallen:
            assert engine.phase in (Phase.RESTING, Phase.STOPPING)

    @invariant()
    def a_users_engine_runs_nothing_else(self) -> None:
        for engine in self.world.machine.engines.values():
            if engine.owner is not None:
                names = {model.name for model, _ in self.world.machine.deployments_on(engine)}
                assert names <= {"own"}
            assert sum(not running.long for running in engine.running.values()) < 2
        own = self.world.models.find("own")
        assert own is None or CPU_ENGINE not in own.deployments

    def teardown(self) -> None:
        """From anywhere, all ends well: requests answered, models served at home, and stored so."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle()
        assert not world.outstanding
        for model in world.models.all():
            assert model.state is State.READY or model.reason
            assert model.on_preferred_engine or "which fails" in model.failover_reason or model.isolated
        assert {manifest.name: manifest for manifest in world.models.manifests()} == world.disk
        again = World(self.fallback, world.disk, world.numbers, cpu=self.cpu)
        again.settle()
        assert all(model.state is State.READY for model in again.models.all())
        for model in again.models.all():
            settled = model.compiled is None or model.manifest.history.current.settled
            assert settled or model.name in again.disk
        again.now += 100.0
        again.tell(told.Tick())
        world.now += 7200.0
        world.tell(told.Tick())
        world.settle()
        for model in world.models.all():
            assert not model.isolated, "what was blamed comes back by itself"
            assert model.on_preferred_engine or "which fails" in model.failover_reason
            assert (
                model.state is State.READY or "wrong answers" in model.reason or "unavailable" in model.reason
            )
        for model in again.models.all():
            assert set(model.deployments) == {model.engine}, "the CPU engine keeps what it does not serve"


TestServing = Serving.TestCase
TestServing.settings = settings(stateful_step_count=40)
