"""What the serving state machine does of each kind of event, by examples."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from honed.daemon import core
from honed.daemon.core import messages as do
from honed.daemon.core import messages as told
from honed.daemon.core.engines import LINGERING_SECONDS
from honed.daemon.core.model import (
    CPU_ENGINE,
    MAX_CRASHES,
    MAX_CRASHES_AN_HOUR,
    MAX_ISOLATED_CRASHES,
    RESTING_SECONDS,
    Phase,
    ServedModel,
    State,
)
from honed.daemon.core.queue import EmptyAxes, Ticket
from honed.daemon.store.versions import TRIAL_REQUESTS, settle
from honed.protocol.errors import OutOfMemory
from honed.runtime.errors import AlreadyExists, InvalidArgument, NotFound, PreconditionBroken, Unavailable

from .serving_world import CHECKED, CLIENT, COMPILED, ISOLATING, USERS_ENGINE, World, manifest, successor


def serving(*, trial: bool = False, fallback: str = "") -> tuple[World, ServedModel]:
    """Model a on a GPU that is ready; with `trial` a successor was published."""
    world = World(fallback)
    world.ready("gpu")
    world.add("a", proven=True)
    if trial:
        world.publish("a")
    return world, world.models.get("a")


def ticket(name: str) -> Ticket:
    return Ticket(number=9999, client=CLIENT, model=name, priority=2, arrived=0.0, deadline=1e9)


def version(world: World) -> int:
    return world.models.get("a").manifest.history.current.number


def crash(world: World, *, outside: bool = False) -> None:
    """A worker ends running what was asked, and the next one serves again."""
    world.lose("gpu", outside=outside)
    world.ready("gpu")
    while world.loads:
        world.end_load(world.loads[0], "well")


def test_a_request_runs_again_in_the_next_worker_and_then_is_given_up() -> None:
    world, model = serving()
    asked = world.ask("a")
    crash(world)
    assert world.runs["gpu"].ticket.number == asked
    assert model.statistics.retries == 1
    crash(world)
    assert asked is not None
    assert "failed in 2 workers" in str(world.answers[asked])
    assert model.state is State.READY


def test_a_model_that_ends_four_workers_in_a_row_is_given_up() -> None:
    world, model = serving()
    for _ in range(MAX_CRASHES // 2):
        world.ask("a")
        crash(world)
        crash(world)
    assert model.state is State.UNAVAILABLE
    assert f"{MAX_CRASHES} workers in a row" in model.reason
    with pytest.raises(Unavailable, match="in a row"):
        world.tell(told.RequestArrived(ticket("a")))


def test_one_that_ends_workers_now_and_then_is_given_up_within_an_hour() -> None:
    world, model = serving()
    for _ in range(MAX_CRASHES_AN_HOUR):
        world.ask("a")
        crash(world)
        world.end_run("gpu", "well")
    assert model.state is State.READY
    world.ask("a")
    crash(world)
    assert "within an hour" in model.reason


def test_a_worker_that_somebody_else_killed_is_not_blamed_on_what_ran() -> None:
    world, model = serving(trial=True)
    asked = world.ask("a")
    crash(world, outside=True)
    world.end_run("gpu", "well")
    assert asked is not None
    assert world.answers[asked] is None
    assert (version(world), model.crash_record.times) == (2, ())


def test_a_worker_that_is_gone_before_the_run_costs_no_attempt() -> None:
    world, model = serving()
    world.ask("a")
    world.end_run("gpu", "not run")
    crash(world)
    assert world.runs["gpu"].ticket.attempts == 1
    assert model.crash_record.crashes == 0


def test_a_successor_that_serves_settles_and_lets_go_of_the_one_before() -> None:
    world, before = serving()
    world.publish("a")
    assert version(world) == 2
    for _ in range(TRIAL_REQUESTS):
        world.ask("a")
        world.end_run("gpu", "well")
    assert before.key in world.loaded["gpu"]
    world.judge(world.judges[0], "well")
    assert before.key not in world.loaded["gpu"]
    assert do.Log("model a: version 2 has served cleanly", error=False) in world.done
    world.persist(world.persists[0])
    assert world.disk["a"].history.current.settled


@pytest.mark.parametrize("how", ["crash", "slower", "two workers that judge", "wrong after a restart of it"])
def test_a_successor_that_does_wrong_goes_at_once(how: str) -> None:
    world, left = serving(trial=True)
    match how:
        case "crash":
            world.ask("a")
            crash(world)
        case "slower":
            world.judges = [do.CompareCanary(left, left)]
            world.judge(world.judges[0], "slower")
        case "two workers that judge":
            for _ in range(2):
                world.judges = [do.CompareCanary(left, left)]
                world.judge(world.judges[0], "broken")
        case _:
            world.lose("gpu", outside=True)
            world.ready("gpu")
            world.end_load(world.loads[0], "refused")
    assert version(world) == 1
    model = world.models.get("a")
    assert model.manifest.history.get(2).quarantine
    world.settle()
    assert model.state is State.READY
    assert world.disk["a"] == model.manifest
    with pytest.raises(AlreadyExists, match="not served any more"):
        world.tell(
            told.SuccessorReady(
                model=left.number,
                manifest=successor(left, "late"),
                compiled=COMPILED,
                proof=told.LoadReport(engine="gpu", worker=world.starts, checked=CHECKED),
            )
        )


def test_what_is_broken_without_a_trial_goes_back_to_an_earlier_version() -> None:
    world, _ = serving(trial=True)
    world.machine.handle(told.CanaryCompared(world.models.get("a").number, ""), 0.0, 0.0)
    world.lose("gpu", outside=True)
    world.ready("gpu")
    world.end_load(world.loads[0], "refused")
    assert version(world) == 1
    [inspect] = [action for action in world.done if isinstance(action, do.InspectFile)]
    read = cast(Any, "another compiled model")
    world.tell(told.Inspected(inspect.model.number, read))
    assert world.models.get("a").compiled is read


def test_after_a_restart_in_its_trial_a_successor_settles_with_the_first_request() -> None:
    world, _ = serving(trial=True)
    again = World(disk=world.disk)
    again.ready("gpu")
    again.end_load(again.loads[0], "well")
    assert not again.models.get("a").manifest.history.current.settled
    again.ask("a")
    again.end_run("gpu", "well")
    again.persist(again.persists[0])
    assert again.disk["a"].history.current == settle(world.disk["a"].history).current


def test_a_second_worker_that_ends_loading_a_model_is_one_too_many_and_others_come_first() -> None:
    world = World()
    world.add("a")
    world.add("b")
    world.ready("gpu")
    assert world.loads[0].model.name == "a"
    world.lose("gpu")
    world.ready("gpu")
    assert world.loads[0].model.name == "b"
    world.end_load(world.loads[0], "well")
    world.lose("gpu")
    assert "ended the process of the gpu 2 times while it was loaded" in world.models.get("a").reason
    world.ready("gpu")
    assert [load.model.name for load in world.loads] == ["b"]


def test_what_a_killed_worker_was_loading_the_next_one_loads() -> None:
    world = World()
    world.add("a")
    world.ready("gpu")
    world.lose("gpu", outside=True)
    world.ready("gpu")
    assert [load.model.name for load in world.loads] == ["a"]
    assert world.models.get("a").crash_record.load_crashes == 0


def test_what_requests_wait_for_is_loaded_first() -> None:
    world = World()
    world.add("a")
    world.add("b")
    world.ask("b")
    world.ready("gpu")
    assert world.loads[0].model.name == "b"


def test_probes_that_are_left_follow_while_it_serves() -> None:
    world = World()
    world.add("a")
    world.ready("gpu")
    world.end_load(world.loads[0], "left")
    assert world.models.get("a").state is State.READY
    world.end_prove(world.proves[0], right=False)
    assert world.models.get("a").state is State.UNAVAILABLE
    assert not world.loaded["gpu"]


@pytest.mark.parametrize("fallback", ["spare", "cpu"])
def test_a_lost_engine_is_stood_in_for_and_its_models_come_back(fallback: str) -> None:
    world, model = serving(fallback=fallback)
    asked = [world.ask("a") for _ in range(3)]
    world.lose("gpu")
    world.lose("gpu", failed=True)
    assert (model.engine, model.preferred_engine) == (fallback, "gpu")
    assert "stands in for the gpu, which is lost" in model.failover_reason
    world.ready(fallback)
    world.end_load(world.loads[0], "well")
    for _ in asked:
        world.end_run(fallback, "well")
    assert [world.answers[number] for number in asked if number] == [None] * 3
    world.ask("a")
    world.ready("gpu")
    assert model.engine == fallback, "until it is loaded there"
    waiting = world.ask("a")
    world.end_load(world.loads[0], "well")
    assert (model.engine, model.failover_reason, set(model.deployments)) == ("gpu", "", {"gpu"})
    assert world.runs["gpu"].ticket.number == waiting
    assert bool(world.stops) is False, "what runs there ends first"
    world.end_run(fallback, "well")
    assert bool(world.stops) is (fallback == "cpu")


def test_a_model_that_its_engine_cannot_run_any_more_stays_away() -> None:
    world, model = serving(fallback="spare")
    world.ready("spare")
    world.lose("gpu", outside=True)
    world.lose("gpu", failed=True)
    world.end_load(world.loads[0], "well")
    world.ready("gpu")
    world.end_load(world.loads[0], "refused")
    assert (model.engine, model.state) == ("spare", State.READY)
    assert "which fails: wrong answers" in model.failover_reason


def test_what_waits_for_a_model_moves_with_the_one_that_replaces_it() -> None:
    world, _ = serving(fallback="spare")
    world.lose("gpu", outside=True)
    world.lose("gpu", failed=True)
    asked = world.ask("a")  # where the stand-in has yet to start
    world.ready("gpu")
    world.add("a", proven=True)
    assert world.runs["gpu"].ticket.number == asked


def test_without_a_stand_in_requests_are_told() -> None:
    world, _ = serving()
    asked = world.ask("a")
    world.lose("gpu", outside=True)
    world.lose("gpu", failed=True)
    assert asked is not None
    assert "does not start" in str(world.answers[asked])
    with pytest.raises(Unavailable, match="does not start"):
        world.tell(told.RequestArrived(ticket("a")))


def test_a_removed_model_answers_what_waits_and_lets_what_runs_end() -> None:
    world, _ = serving()
    runs, waits = world.ask("a"), world.ask("a")
    world.remove("a")
    assert waits is not None
    assert isinstance(world.answers[waits], NotFound)
    world.end_run("gpu", "well")
    assert runs is not None
    assert world.answers[runs] is None
    assert not world.loaded["gpu"]


def test_a_request_with_runs_to_come_is_refused_once_its_model_was_removed() -> None:
    world, _ = serving()
    asked = world.ask("a")
    world.remove("a")
    world.end_run("gpu", "more")
    assert asked is not None
    assert "removed" in str(world.answers[asked])


def test_a_model_that_loads_after_one_that_was_removed_meanwhile_is_not_forgotten() -> None:
    world = World("")
    world.ready("gpu")
    world.add("a", proven=False)
    world.add("b", proven=False)
    (load,) = world.loads
    other = "b" if load.model.name == "a" else "a"
    world.remove(load.model.name)
    world.end_load(load, "refused")
    assert [again.model.name for again in world.loads] == [other]


def test_nothing_is_loaded_in_a_worker_that_ended_loading_what_was_removed() -> None:
    world = World("")
    world.add("a", proven=False)
    world.ready("gpu")
    world.add("b", proven=False)
    world.remove("a")
    world.lose("gpu")
    assert not world.loads
    world.ready("gpu")
    assert [load.model.name for load in world.loads] == ["b"]


def test_one_file_under_two_names_is_loaded_once_and_kept_for_both() -> None:
    world, _ = serving()
    twin = dataclasses.replace(world.models.get("a").manifest, name="b")
    world.disk["b"] = twin
    world.tell(told.Added(manifest=twin, compiled=COMPILED, preferred_engine="gpu", proof=None))
    assert world.models.get("b").state is State.READY
    assert not world.loads
    world.remove("a")
    assert twin.compiled.sha256 in world.loaded["gpu"]


def test_the_version_before_stays_loaded_although_its_other_name_goes() -> None:
    world, before = serving()
    world.disk["b"] = twin = dataclasses.replace(before.manifest, name="b")
    world.tell(told.Added(manifest=twin, compiled=COMPILED, preferred_engine="gpu", proof=None))
    world.publish("a")
    world.remove("b")
    assert before.key in world.loaded["gpu"]


def test_removing_a_model_on_trial_unloads_both_versions() -> None:
    world, _ = serving(trial=True)
    world.remove("a")
    assert not world.loaded["gpu"]


def test_what_a_worker_before_has_loaded_is_loaded_again() -> None:
    world, _ = serving()
    kept = manifest("b", "b1")
    proof = world.prove("gpu", "b1")
    crash(world)
    world.disk["b"] = kept
    world.tell(told.Added(manifest=kept, compiled=COMPILED, preferred_engine="gpu", proof=proof))
    assert world.models.get("b").state is State.LOADING
    assert [load.model.name for load in world.loads] == ["b"]


@pytest.mark.parametrize("how", ["well", "more", "unfit", "broken"])
def test_who_left_is_not_answered_and_does_not_run_again(how: str) -> None:
    world, _ = serving()
    asked = world.ask("a")
    assert asked is not None
    world.leave(asked)
    world.end_run("gpu", how)
    assert asked not in world.answers
    world.settle()
    assert world.models.get("a").statistics.retries == 0
    assert not any(engine.queue.models() for engine in world.machine.engines.values())


def test_a_stand_in_that_is_needed_again_while_it_stops_starts_again() -> None:
    world, model = serving(fallback="cpu")
    for _ in range(2):
        world.lose("gpu", outside=True)
        world.lose("gpu", failed=True)
        if world.stops:
            break
        world.ready("cpu")
        world.end_load(world.loads[0], "well")
        world.ready("gpu")
        world.end_load(world.loads[0], "well")
    assert (model.engine, world.machine.engines["cpu"].phase) == ("cpu", Phase.STOPPING)
    world.stop(world.stops[0])
    world.ready("cpu")
    world.end_load(world.loads[0], "well")
    assert model.state is State.READY


def imports(path: Path) -> set[str]:
    """The modules that a file imports, those of its own folder as ".name"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {f".{node.module}"} if node.module else {f".{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_machine_does_nothing_itself_and_its_files_import_in_one_direction() -> None:
    files = {f".{path.stem}": imports(path) for path in Path(core.__file__).parent.glob("*.py")}
    doing = {
        "asyncio",
        "time",
        "logging",
        "os",
        "socket",
        "threading",
        "subprocess",
        "honed.daemon.serving.pool",
    }
    assert not {file: found & doing for file, found in files.items() if found & doing}
    while leaves := {file for file, found in files.items() if not found & set(files)}:
        for file in leaves:
            del files[file]
    assert not files, "these import each other"


def both_engines() -> tuple[World, ServedModel]:
    """Model a is compiled, and the CPU engine knows its file."""
    world = World(cpu=True)
    world.ready("gpu")
    world.add_given("a")
    world.ready(CPU_ENGINE)
    world.end_load(world.loads[0], "well")
    return world, world.models.get("a")


def test_the_cpu_engine_serves_until_the_compiled_form_does_and_then_rests() -> None:
    world, model = both_engines()
    assert (model.on_cpu, model.state) == (True, State.READY)
    world.ask("a")
    waiting = world.ask("a")
    world.compile("a", "gpu")
    assert world.runs["gpu"].ticket.number == waiting, "what waits moves"
    world.end_run("gpu", "well")
    world.end_run(CPU_ENGINE, "well")
    world.now += LINGERING_SECONDS + 1
    world.tell(told.Tick())
    assert [stop.engine for stop in world.stops] == [CPU_ENGINE]


def test_an_engine_keeps_what_a_run_needs_although_the_model_has_moved() -> None:
    """The run may not have reached the engine's process: its data is mapped there first."""
    world, _ = both_engines()
    world.compile("a", "gpu")
    world.pin_engine("a", "cpu")
    while world.loads:
        world.end_load(world.loads[0], "well")
    asked = world.ask("a")
    assert world.runs[CPU_ENGINE].ticket.number == asked
    world.pin_engine("a", "gpu")
    world.end_load(world.loads[0], "well")
    assert world.models.get("a").on_device
    assert CPU_ENGINE not in world.models.get("a").deployments
    assert world.loaded[CPU_ENGINE]
    world.end_run(CPU_ENGINE, "well")
    assert not world.loaded[CPU_ENGINE]
    assert asked is not None
    assert world.answers[asked] is None


def test_what_was_refused_is_unloaded_once_no_run_needs_it() -> None:
    world, _ = serving()
    world.publish("a")
    world.ask("a")
    key = world.models.get("a").key
    world.tell(told.ProbeFailed(world.models.get("a").deployment.number, "wrong answers"))
    assert key in world.loaded["gpu"]
    world.end_run("gpu", "well")
    assert key not in world.loaded["gpu"]
    assert world.models.get("a").key in world.loaded["gpu"]


def test_what_is_not_loaded_is_loaded_and_its_request_runs_again() -> None:
    world, _ = both_engines()
    asked, other = world.ask("a"), world.ask("a")
    world.end_run(CPU_ENGINE, "not loaded")
    world.end_load(world.loads[0], "well")
    for number in (asked, other):
        assert world.runs[CPU_ENGINE].ticket.number == number
        world.end_run(CPU_ENGINE, "well")
        assert number is not None
        assert world.answers[number] is None


def test_a_run_without_memory_goes_to_the_process_apart_and_is_nobodys_fault() -> None:
    world, model = both_engines()
    asked = world.ask("a")
    for _ in range(MAX_ISOLATED_CRASHES):
        world.end_run(CPU_ENGINE, "no memory")
        world.ready(ISOLATING)
        while world.loads:
            world.end_load(world.loads[0], "well")
        world.end_run(ISOLATING, "no memory")
        assert asked is not None
        assert isinstance(world.answers[asked], OutOfMemory)
        assert (model.state, model.isolated, model.crash_record.crashes) == (State.READY, "", 0)
        asked = world.ask("a")
    world.end_run(CPU_ENGINE, "no memory")
    world.end_run(ISOLATING, "well")
    assert asked is not None
    assert world.answers[asked] is None


def test_a_model_for_which_a_cpu_engine_has_no_memory_runs_apart_for_a_while() -> None:
    world = World("", cpu=True)
    world.ready("gpu")
    world.add_given("a")
    world.ready(CPU_ENGINE)
    asked = world.ask("a")
    world.end_load(world.loads[0], "short")
    model = world.models.get("a")
    assert "has no memory for it beside other models" in model.isolated
    assert not world.loaded[CPU_ENGINE]
    world.ready(ISOLATING)
    world.end_load(world.loads[0], "short")
    assert "tried again after" in model.reason
    world.now += LINGERING_SECONDS
    asked = world.ask("a")
    world.ready(ISOLATING)
    world.end_load(world.loads[0], "well")
    world.end_run(ISOLATING, "well")
    assert asked is not None
    assert world.answers[asked] is None


def test_other_shapes_are_served_by_the_cpu_engine_which_loads_the_model_for_that() -> None:
    world, _ = both_engines()
    world.compile("a", "gpu")
    world.now += LINGERING_SECONDS + 1
    world.tell(told.Tick())
    world.stop(world.stops[0])
    asked = world.ask("a", is_open=True)
    world.ready(CPU_ENGINE)
    world.end_load(world.loads[0], "well")
    assert world.runs[CPU_ENGINE].ticket.number == asked
    crash_cpu(world)
    world.end_run(ISOLATING, "well")
    assert asked is not None
    assert world.answers[asked] is None
    assert world.models.get("a").on_device


def test_values_that_a_compiled_form_does_not_serve_are_served_by_the_cpu_engine() -> None:
    world, _ = both_engines()
    world.compile("a", "gpu")
    world.now += LINGERING_SECONDS + 1
    world.tell(told.Tick())
    world.stop(world.stops[0])
    asked, other = world.ask("a", empty=()), world.ask("a", empty=())
    world.end_run("gpu", "values")
    assert world.runs["gpu"].ticket.number == other, "others are not held up"
    world.end_run("gpu", "well")
    world.ready(CPU_ENGINE)
    world.end_load(world.loads[0], "well")
    assert world.runs[CPU_ENGINE].ticket.number == asked
    world.end_run(CPU_ENGINE, "well")
    assert asked is not None
    assert world.answers[asked] is None
    assert world.models.get("a").statistics.preconditions == 1
    several = world.ask("a")  # or what has state in the form: who asked asks again
    assert several is not None
    world.end_run("gpu", "values")
    assert isinstance(world.answers[several], PreconditionBroken)


def crash_cpu(world: World, engine: str = CPU_ENGINE) -> None:
    """A CPU engine's process ends running what it began last, and each is there again."""
    while world.loads:
        world.end_load(world.loads[0], "well")
    world.lose(engine)
    for each in (CPU_ENGINE, ISOLATING):
        world.ready(each)
    while world.loads:
        world.end_load(world.loads[0], "well")


def end_twice(world: World) -> None:
    """What runs ends the process of all models, and then the one in which it runs again alone."""
    crash_cpu(world)
    crash_cpu(world, ISOLATING)


def test_empty_inputs_that_end_the_cpu_engine_are_refused_and_the_model_goes_on() -> None:
    world, model = both_engines()
    nothing = (("x", (0,)),)
    first, waits = world.ask("a", empty=nothing), world.ask("a", empty=nothing)
    end_twice(world)
    crash_cpu(world)  # it ran among the others meanwhile
    for asked in (first, waits):
        assert asked is not None
        assert "are empty ('x' in axis 0)" in str(world.answers[asked])
        assert isinstance(world.answers[asked], InvalidArgument)
    for _ in range(MAX_CRASHES_AN_HOUR + 1):
        assert world.ask("a", empty=nothing) is None, "it is refused at once"
        other = world.ask("a", empty=())
        world.end_run(CPU_ENGINE, "well")
        assert other is not None
        assert world.answers[other] is None
    assert (model.state, model.crash_record.crashes) == (State.READY, 0)


def test_empty_inputs_that_were_answered_before_are_no_reason() -> None:
    world, model = both_engines()
    nothing = (("x", (0,)),)
    world.ask("a", empty=nothing)
    world.end_run(CPU_ENGINE, "well")
    world.ask("a", empty=nothing)
    end_twice(world)
    assert world.ask("a", empty=nothing) is not None
    assert model.isolated


@pytest.mark.parametrize("empty", [(), None])
def test_what_ends_the_cpu_engine_twice_has_wrong_inputs_where_it_is_one_request(empty: EmptyAxes) -> None:
    world, model = both_engines()
    asked = world.ask("a", empty=empty)
    end_twice(world)
    assert asked is not None
    assert isinstance(world.answers[asked], Unavailable if empty is None else InvalidArgument)
    assert (model.state, model.engine) == (State.READY, ISOLATING)


def test_a_compiled_form_that_does_wrong_makes_way_for_the_cpu_engine() -> None:
    world, _ = both_engines()
    world.compile("a", "gpu")
    world.lose("gpu", outside=True)
    world.ready("gpu")
    world.end_load(next(load for load in world.loads if load.engine == "gpu"), "refused")
    model = world.models.get("a")
    assert (model.on_cpu, model.state, model.manifest.decision.chosen) == (True, State.READY, "cpu")
    assert "wrong answers" in model.manifest.decision.reason
    world.persist(world.persists[0])
    assert world.disk["a"].decision.chosen == "cpu"


def test_without_the_cpu_engine_what_only_that_can_run_says_so() -> None:
    world, _ = both_engines()
    again = World(disk=world.disk)
    model = again.models.get("a")
    assert model.state is State.UNAVAILABLE
    assert "install honed-cpu" in model.reason


def test_a_users_engine_rests_with_what_it_serves_until_that_is_asked_for() -> None:
    world = World(cpu=True)
    world.ready("gpu")
    world.add_given("own")
    world.settle()
    engine, model = world.machine.engines[USERS_ENGINE], world.models.get("own")
    first = world.ask("own")
    world.settle()
    assert (engine.phase, model.engine) == (Phase.READY, USERS_ENGINE)
    world.now += RESTING_SECONDS + 1
    world.tell(told.Tick())
    world.settle()
    assert (engine.phase, model.state) == (Phase.RESTING, State.READY)
    asked = world.ask("own")
    assert engine.phase is Phase.STARTING
    world.settle()
    assert world.answers == {first: None, asked: None}
    again = World(disk=world.disk, cpu=True)
    assert again.models.get("own").state is State.READY
    assert again.machine.engines[USERS_ENGINE].phase is Phase.RESTING, "a start of the service loads nothing"


# ---- Who pays for the end of a CPU engine's process ----


def two_on_cpu() -> tuple[World, ServedModel, ServedModel]:
    """Models a and b, which ONNX Runtime serves."""
    world = World(cpu=True)
    world.ready("gpu")
    for name in ("a", "b"):
        world.add_given(name)
    world.settle()
    return world, world.models.get("a"), world.models.get("b")


def test_a_load_is_not_charged_for_the_end_of_a_process_in_which_something_ran() -> None:
    world, _, other = two_on_cpu()
    for _ in range(3):
        world.remove("b")
        world.ask("a")
        world.add_given("b")  # it is loaded beside the run
        assert [load.model.name for load in world.loads] == ["b"]
        world.lose(CPU_ENGINE)
        world.settle()
    other = world.models.get("b")
    assert (other.state, other.reason, other.crash_record.load_crashes) == (State.READY, "", 0)


def test_a_load_is_charged_where_nothing_ran_and_tried_again_with_growing_pauses() -> None:
    world = World(cpu=True)
    world.ready("gpu")
    world.add_given("a")
    model, pauses = world.models.get("a"), list[float]()
    for _ in range(4):
        while model.state is not State.UNAVAILABLE:
            world.ready(CPU_ENGINE)
            world.lose(CPU_ENGINE)
        assert f"it ended the process of the {CPU_ENGINE}" in model.reason
        begun = world.now
        while model.state is State.UNAVAILABLE:
            world.now += 1.0
            world.tell(told.Tick())
        pauses.append(world.now - begun)
    assert pauses == [60.0, 120.0, 240.0, 480.0]
    world.settle()
    assert (model.state, model.reason) == (State.READY, "")


def test_what_began_last_runs_again_apart_and_the_guilty_stays_there() -> None:
    world, long, guilty = two_on_cpu()
    first = world.ask("a")
    world.end_run(CPU_ENGINE, "lasts")
    second = world.ask("b")
    assert [run.ticket.number for run in world.running] == [first, second]
    crash_cpu(world)
    assert world.runs[CPU_ENGINE].ticket.number == first, "it goes on among all"
    assert world.runs[ISOLATING].ticket.number == second
    crash_cpu(world, ISOLATING)
    world.settle()
    assert first is not None
    assert second is not None
    assert world.answers[first] is None
    assert "failed in 2 workers" in str(world.answers[second])
    assert (long.engine, guilty.engine) == (CPU_ENGINE, ISOLATING)
    assert "ended the process" in guilty.remark
    assert (long.remark, long.crash_record.crashes) == ("", 0)


def test_what_is_acquitted_goes_on_among_all() -> None:
    world, model, _ = two_on_cpu()
    asked = world.ask("a")
    crash_cpu(world)
    world.end_run(ISOLATING, "well")
    assert asked is not None
    assert world.answers[asked] is None
    assert (model.engine, model.isolated, model.crash_record.crashes) == (CPU_ENGINE, "", 0)


def test_what_ends_processes_after_a_long_while_is_found_out_in_the_end() -> None:
    world, guilty, _ = two_on_cpu()
    world.ask("a")
    while not guilty.isolated:
        while (apart := world.runs.get(ISOLATING)) is not None and apart.model is not guilty:
            world.end_run(ISOLATING, "well")
        while world.loads:
            world.end_load(world.loads[0], "well")
        where = next(run.engine for run in world.running if run.model is guilty)
        world.end_run(where, "lasts")
        if where == CPU_ENGINE:
            world.ask("b")
        crash_cpu(world, where)
    world.settle()
    assert guilty.isolated
    assert (world.models.get("b").engine, world.models.get("b").isolated) == (CPU_ENGINE, "")


def test_an_isolated_model_comes_back_by_itself_and_later_each_time() -> None:
    world, model, _ = two_on_cpu()
    waited = list[float]()
    for _ in range(3):
        world.ask("a")
        crash_cpu(world)
        crash_cpu(world, ISOLATING)
        begun = world.now
        while model.isolated:
            assert (model.engine, model.preferred_engine, model.state) == (ISOLATING, ISOLATING, State.READY)
            world.now += 10.0
            world.tell(told.Tick())
        waited.append(world.now - begun)
        world.settle()
        assert (model.engine, model.preferred_engine, model.state) == (CPU_ENGINE, CPU_ENGINE, State.READY)
    assert waited == [60.0, 120.0, 240.0]


def test_what_ended_processes_before_is_loaded_after_all_others() -> None:
    world, _, _ = two_on_cpu()
    world.ask("a")
    crash_cpu(world)
    crash_cpu(world, ISOLATING)
    world.now += 60.0
    world.tell(told.Tick())
    world.settle()
    world.ask("a")
    world.lose(CPU_ENGINE, outside=True)
    world.ask("b")
    world.ready(CPU_ENGINE)
    assert [load.model.name for load in world.loads] == ["b"]


def test_a_model_that_ends_process_after_process_is_refused_for_a_while() -> None:
    world, model, other = two_on_cpu()
    world.ask("a")
    crash_cpu(world)
    crash_cpu(world, ISOLATING)
    for _ in range(MAX_ISOLATED_CRASHES - 2):
        assert world.ask("a") is not None
        crash_cpu(world, ISOLATING)
    assert model.state is State.UNAVAILABLE
    assert "6 times in a row; last: it crashed; it is tried again after 2 s" in model.reason
    assert world.ask("a") is None
    assert other.state is State.READY
    world.now += 2.0
    asked = world.ask("a")
    world.settle()
    assert asked is not None
    assert (world.answers[asked], model.state) == (None, State.READY)


def test_a_step_runs_again_where_its_state_is() -> None:
    world, _, _ = two_on_cpu()
    asked = world.ask("a", held=True)
    crash_cpu(world)
    assert world.runs[CPU_ENGINE].ticket.number == asked


# ---- Runs that take long, and runs that nobody waits for ----


def test_other_models_run_beside_one_that_takes_long() -> None:
    world, _, _ = two_on_cpu()
    world.ask("a")
    waits, other = world.ask("a"), world.ask("b")
    assert len(world.running) == 1
    world.end_run(CPU_ENGINE, "lasts")
    assert world.runs[CPU_ENGINE].ticket.number == other
    world.end_run(CPU_ENGINE, "well")
    assert other is not None
    assert world.answers[other] is None
    assert waits in world.outstanding, "a model runs once at a time"


def test_a_run_that_nobody_waits_for_is_to_end() -> None:
    world, _, _ = two_on_cpu()
    asked = world.ask("a")
    assert asked is not None
    world.leave(asked)
    assert do.EndRun(CPU_ENGINE, asked) in world.done


def test_a_users_engine_loads_a_model_of_a_lost_device_only_when_that_is_asked_for() -> None:
    world = World(cpu=True)
    world.ready("gpu")
    world.add_given("own")
    world.compile("own", "gpu")
    world.settle()
    world.now += RESTING_SECONDS + 1
    world.tell(told.Tick())
    world.settle()
    engine, model = world.machine.engines[USERS_ENGINE], world.models.get("own")
    assert (engine.phase, model.engine) == (Phase.RESTING, "gpu")
    world.lose("gpu")
    world.lose("gpu", failed=True)
    assert (engine.phase, model.engine, model.state) == (Phase.RESTING, USERS_ENGINE, State.READY)
    asked = world.ask("own")
    assert engine.phase is Phase.STARTING
    world.settle()
    assert world.answers == {asked: None}
