"""Variants in the serving machine: they rest when they have nothing to do, and fail to the CPU engine."""

from __future__ import annotations

import pytest

from honed.daemon.core import messages as do
from honed.daemon.core import messages as told
from honed.daemon.core.model import CPU_ENGINE, State
from honed.daemon.core.statistics import ServedInference
from honed.runtime.errors import NotFound

from .serving_world import World

MODEL, VARIANT = "a", "a@2"


@pytest.fixture
def world() -> World:
    """A model that the CPU engine serves, with a variant on the device."""
    world = World(cpu=True)
    world.ready("gpu")
    for name in (MODEL, VARIANT):
        world.add_given(name)
        world.ready(CPU_ENGINE)
        while world.loads:
            world.end_load(world.loads[0], "well")
    world.compile(VARIANT, "gpu")
    assert world.models.get(VARIANT).state is State.READY
    return world


def test_it_rests_only_when_it_has_nothing_to_do(world: World) -> None:
    key = world.models.get(VARIANT).key
    request = world.ask(VARIANT)
    world.tell(told.SuspendRequested(VARIANT))
    assert world.models.find(VARIANT) is not None, "a request runs"
    world.end_run("gpu", "well")
    assert request is not None
    assert world.answers[request] is None
    world.tell(told.SuspendRequested(VARIANT))
    assert world.models.find(VARIANT) is None
    assert do.Unload("gpu", key) in world.done
    assert [variant.name for variant in world.models.variants(MODEL)] == [VARIANT]
    assert world.models.get(MODEL).state is State.READY, "the CPU engine keeps what they share"
    world.wake(VARIANT)
    world.end_load(world.loads[0], "well")
    assert world.models.get(VARIANT).state is State.READY
    assert not world.models.is_suspended(world.models.get(VARIANT))


def test_a_request_whose_variant_breaks_is_answered_by_the_cpu_engine(world: World) -> None:
    request = world.ask(VARIANT)
    for load in (1, 2):
        world.end_run("gpu", "broken")
        world.ready("gpu")
        if world.loads:
            world.end_load(world.loads[0], "refused" if load == 1 else "well")
    world.end_run(CPU_ENGINE, "well")
    assert request is not None
    assert world.answers[request] is None
    assert world.models.get(VARIANT).on_cpu
    assert world.models.get(VARIANT).manifest.decision.chosen == "cpu"


def test_one_that_rests_is_removed_like_any(world: World) -> None:
    world.rest(VARIANT)
    world.remove(VARIANT)
    assert not world.models.variants()
    with pytest.raises(NotFound):
        world.models.entry(VARIANT)


def test_apps_know_of_no_variants(world: World) -> None:
    assert [model.name for model in world.models.models()] == [MODEL]
    with pytest.raises(NotFound, match="ask its model, 'a'"):
        world.models.model(VARIANT)
    assert world.models.entry(VARIANT).name == VARIANT


def test_requests_of_a_variant_are_its_models_too(world: World) -> None:
    served = ServedInference(
        engine="gpu", queued=0.0, total=0.1, input_ns=1, infer_ns=1, output_ns=1, launches=0
    )
    world.models.get(VARIANT).statistics.count_served(served, now=0.0, wall_ms=1)
    for statistics in (world.models.get(MODEL).statistics, world.models.all_statistics):
        assert statistics.engines == {"gpu": 1}
    world.rest(VARIANT)
    world.wake(VARIANT)
    assert world.models.get(VARIANT).statistics.engines == {"gpu": 1}
