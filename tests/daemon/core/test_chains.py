"""Chains without a service: what can be one, what it takes and gives, and which steps run when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.chains import between
from honed.daemon.chains.between import BetweenMemory
from honed.daemon.chains.definition import Chain, ChainProgress, TensorSource, chained, source
from honed.daemon.chains.fitting import interface
from honed.daemon.chains.stored import ChainStore
from honed.daemon.store.interface import Interface, OpenTensor
from honed.daemon.worker.regions import HeldRegion
from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.params import ChainStep


def step(name: str, **inputs: str) -> ChainStep:
    return ChainStep(model="m", name=name, inputs=inputs)


def chain(*steps: ChainStep, **outputs: str) -> Chain:
    return chained("c", 0.0, steps, outputs)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Any chain of up to eight steps, given in any order."""
    steps: list[ChainStep] = []
    sources = ["in", "in2"]
    for number in range(draw(st.integers(1, 8))):
        takes = draw(st.lists(st.sampled_from(sources), max_size=3))
        steps.append(step(f"s{number}", **{f"x{i}": text for i, text in enumerate(takes)}))
        sources += [f"s{number}:y", f"s{number}:z"]
    read = {source(text).step for each in steps for text in each.inputs.values()}
    unread = [f"{each.name}:y" for each in steps if each.name not in read]
    more = draw(st.sets(st.sampled_from(sources[2:])))
    outputs = {f"o{i}": text for i, text in enumerate(sorted({*unread, *more}))}
    return chained("c", 0.0, draw(st.permutations(steps)), outputs)


@given(chains())
def test_steps_stand_behind_what_they_take_from(made: Chain) -> None:
    before: set[str] = {""}
    for each in made.steps:
        assert {source(text).step for text in each.inputs.values()} <= before
        before.add(each.name)


@given(st.data(), chains())
def test_each_step_runs_once_and_what_is_freed_is_not_read(data: st.DataObject, made: Chain) -> None:
    wanted = data.draw(st.sets(st.sampled_from(sorted(made.outputs)), min_size=1))
    answered = {source(made.outputs[name]) for name in wanted}
    progress = ChainProgress(made, wanted)
    takes = {each.name: {source(text) for text in each.inputs.values()} for each in made.steps}
    running: list[str] = []
    begun: list[str] = []
    done: set[str] = set()
    freed: set[str] = set()
    while not progress.finished:
        for name in progress.begun():
            assert {of.step for of in takes[name]} - {""} <= done
            assert not {of.step for of in takes[name]} & freed
            given = progress.needed(name)
            later = {"y", "z"} & {of.tensor for each in takes.values() for of in each if of.step == name}
            assert {of.tensor for of in answered if of.step == name} <= set(given)
            assert set(given) >= {t for t in later if progress.read_later(name, t)}
            assert given
            assert set(given) <= {"y", "z"}
            running.append(name)
            begun.append(name)
        finished = running.pop(data.draw(st.integers(0, len(running) - 1)))
        done.add(finished)
        for name in progress.done(finished):
            assert name not in freed
            assert name in done
            assert not any(of.step == name for of in answered)
            freed.add(name)
    assert len(begun) == len(set(begun))
    assert set(begun) == done == {each.name for each in progress.steps}
    assert freed == done - {of.step for of in answered}, "all that the answer does not have"


@pytest.mark.parametrize(
    ("steps", "outputs", "told"),
    [
        ((), {"o": "a:y"}, "a chain of 0 steps is not possible"),
        ((step("a", x="in"),), {}, "a chain with 0 outputs"),
        ((step("a", x="in"), step("a", x="in")), {"o": "a:y"}, "two steps are called 'a'"),
        ((step("a b", x="in"),), {"o": "a b:y"}, "'a b' cannot name a step"),
        ((step("a", x="b:y"),), {"o": "a:y"}, "comes from step 'b', and there is none"),
        ((step("a", x=""),), {"o": "a:y"}, "input 'x' of step 'a' comes from ''; write STEP:OUTPUT"),
        ((step("a", x=":y"),), {"o": "a:y"}, "comes from ':y'; write STEP:OUTPUT"),
        ((step("a", x="in"),), {"o": "in"}, "output 'o' comes from 'in', which is no step's"),
        ((step("a", x="in"),), {"o": "b:y"}, "output 'o' comes from step 'b', and there is none"),
        ((step("a", x="in"),), {"o": "a:y", "p": "a:y"}, "outputs 'o' and 'p' are both 'a:y'"),
        ((step("a", x="in"), step("b", x="in")), {"o": "a:y"}, "nothing takes what step 'b' gives"),
        ((step("a", x="a:y"),), {"o": "a:y"}, "step 'a' waits for step 'a'; a chain"),
        (
            (step("a", x="in"), step("b", x="c:y"), step("c", x="b:y", y="a:y")),
            {"o": "c:y"},
            "step 'b' waits for step 'c' for step 'b'; a chain",
        ),
    ],
)
def test_what_cannot_be_a_chain(steps: tuple[ChainStep, ...], outputs: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chain(*steps, **outputs)
    assert told in str(refused.value)


def test_colons_belong_to_what_follows_the_first() -> None:
    assert source("step:image:0") == TensorSource("step", "image:0")
    assert source("image") == TensorSource("", "image")


def tensor(name: str, *sizes: int | str, dtype: str = "float32") -> OpenTensor:
    shape = tuple(-1 if isinstance(size, str) else size for size in sizes)
    symbols = tuple(size if isinstance(size, str) else "" for size in sizes)
    return OpenTensor(name=name, dtype=dtype, shape=shape, symbols=symbols)


def model(takes: list[OpenTensor], gives: list[OpenTensor]) -> Interface:
    return Interface(inputs=tuple(takes), outputs=tuple(gives), opset=17, producer="")


ANY = OpenTensor(name="x", dtype="float32", shape=None)
MODELS: Mapping[str, Interface] = {
    "rows": model([tensor("x", "n", 3)], [tensor("y", "n", 8), tensor("m", "k")]),
    "four": model([tensor("x", 4, 8)], [tensor("y", 4)]),
    "any": model([ANY], [OpenTensor(name="y", dtype="float32", shape=None)]),
    "two": model([tensor("a", "s", 8), tensor("b", "s", 8)], [tensor("y", "s")]),
    "ints": model([tensor("x", "n", dtype="int64")], [tensor("y", dtype="int64")]),
    "scalar": model([tensor("x")], [tensor("y")]),
}


def of(name: str, step: str = "", **inputs: str) -> ChainStep:
    return ChainStep(model=name, name=step, inputs=inputs)


def test_open_sizes_become_one_where_tensors_meet() -> None:
    found = interface(chain(of("rows", x="in"), of("four", x="rows:y"), o="four:y", m="rows:m"), MODELS)
    assert [(t.name, t.dtype, t.shape) for t in found.inputs] == [("in", "float32", (4, 3))]
    assert [(t.name, t.shape) for t in found.outputs] == [("o", (4,)), ("m", (-1,))]
    found = interface(chain(of("rows", x="in"), of("any", x="rows:y"), o="any:y"), MODELS)
    assert [t.shape for t in (*found.inputs, *found.outputs)] == [(-1, 3), None]
    both = chain(
        of("rows", "r", x="in"), of("two", a="r:y", b="other"), of("four", x="other"), o="two:y", p="four:y"
    )
    assert [(t.name, t.shape) for t in interface(both, MODELS).inputs] == [("in", (4, 3)), ("other", (4, 8))]
    shared = chain(of("scalar", x="in"), of("any", x="in"), o="scalar:y", p="any:y")
    assert interface(shared, MODELS).inputs[0].shape == ()
    shared = chain(of("any", x="in"), of("scalar", x="in"), o="scalar:y", p="any:y")
    assert interface(shared, MODELS).inputs[0].shape == ()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (chain(of("rows", z="in"), o="rows:y"), "model 'rows' has no input 'z'; it has x"),
        (chain(of("two", a="in"), o="two:y"), "input 'b' of model 'two' comes from nowhere"),
        (chain(of("rows", x="in"), o="rows:z"), "model 'rows' has no output 'z'; it has y, m"),
        (
            chain(of("rows", x="in"), of("any", x="rows:z"), o="any:y"),
            "input 'x' of step 'any' comes from 'rows:z', and model 'rows' has no output 'z'",
        ),
        (
            chain(of("rows", x="in"), of("ints", x="rows:m"), o="ints:y"),
            "input 'x' of step 'ints' is INT64 [-1], and what comes from 'rows:m' is FP32 [-1]",
        ),
        (
            chain(of("four", x="in"), of("rows", x="in"), o="rows:y", p="four:y"),
            "input 'x' of step 'rows' is FP32 [-1, 3], and what comes from 'in' is FP32 [4, 8]",
        ),
        (
            chain(of("rows", x="in"), of("rows", "again", x="rows:m"), o="again:y"),
            "input 'x' of step 'again' is FP32 [-1, 3], and what comes from 'rows:m' is FP32 [-1]",
        ),
    ],
)
def test_what_does_not_fit(made: Chain, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        interface(made, MODELS)
    assert told in str(refused.value)


@given(chains())
def test_what_is_stored_is_read_again(tmp_path_factory: pytest.TempPathFactory, made: Chain) -> None:
    store = ChainStore(tmp_path_factory.mktemp("state"))
    assert store.read() == ([], [])
    store.write(made)
    assert store.read() == ([made], [])
    store.remove(made.name)
    assert store.read() == ([], [])


def test_what_was_altered_is_set_aside(tmp_path: Path) -> None:
    store = ChainStore(tmp_path)
    store.read()
    store.write(chain(step("a", x="in"), o="a:y"))
    path = tmp_path / "chains" / "c.json"
    path.write_bytes(path.read_bytes().replace(b'"a:y"', b'"a:z"'))
    (tmp_path / "chains" / ".c.json.half.tmp").write_bytes(b"{")
    chains, [told] = store.read()
    assert chains == []
    assert "it does not match its checksum" in told
    assert [each.name for each in (tmp_path / "chains").iterdir()] == ["c.json.damaged"]


def test_memory_is_used_again_but_not_while_a_run_may_write_to_it() -> None:
    released: list[HeldRegion] = []

    async def use() -> None:
        memory = BetweenMemory(released.append)
        first = memory.take(70_000)
        assert first.byte_size == 1 << 17
        assert os.fstat(first.descriptor).st_size == 1 << 17
        other = memory.take(70_000)
        assert other is not first
        memory.give_back(first)
        assert memory.take(100_000) is first
        first.hold()
        memory.give_back(first)
        assert released == [first]
        assert memory.take(100_000) is not first

    asyncio.run(use())


def test_memory_is_set_aside_in_order_and_one_user_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "_USER_BYTES", 100)
    monkeypatch.setattr(between, "_ALL_BYTES", 150)
    order: list[str] = []

    async def use(memory: BetweenMemory, name: str, user: int, nbytes: int, end: asyncio.Event) -> None:
        async with memory.reserved(user, nbytes):
            order.append(name)
            await end.wait()

    async def all_of_them() -> None:
        memory = BetweenMemory(lambda _: None)
        wishes = {"a": (1, 80), "b": (1, 30), "c": (1, 10), "d": (2, 60), "e": (3, 70), "f": (4, 5)}
        ends = {name: asyncio.Event() for name in wishes}
        tasks = {
            name: asyncio.ensure_future(use(memory, name, *wish, ends[name])) for name, wish in wishes.items()
        }
        await asyncio.sleep(0)
        assert order == ["a", "d"], "c does not overtake b, nor f, whom there is room for, e"
        tasks["b"].cancel()
        ends["a"].set()
        await asyncio.wait([tasks["a"], tasks["b"]])
        await asyncio.sleep(0)
        assert order == ["a", "d", "c", "e", "f"]
        for end in ends.values():
            end.set()
        await asyncio.wait(tasks.values())
        assert not memory._reserved
        assert not memory._wishes
        with pytest.raises(ResourceExhausted, match="has 151 bytes and may have 150"):
            await use(memory, "g", 1, 151, ends["a"])

    asyncio.run(all_of_them())
