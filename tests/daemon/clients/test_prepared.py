"""Prepared requests are answered as if each were sent whole, whatever happens to their model meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from honed.daemon.methods.pipeline import MOST_PREPARED
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.shared_memory import Region
from honed.runtime.errors import HonedError, InvalidArgument, NotFound
from tests.daemon.clients.test_repeated import ANOTHER, GOOD, INPUT, X, answered
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw
from tests.daemon.running import NO_TUNER, Service
from tests.runtime.builder import add_constant

OWN = ("id", "raw_input_contents")


def prepared(raw: Raw, params: dict[str, Any]) -> Any:
    """The answer to a request that is prepared and run; the error of what failed first."""
    told = answered(raw, {name: each for name, each in params.items() if name not in OWN}, "ModelPrepare")
    if set(told) != {"number"}:
        return told
    return answered(raw, told | {name: params[name] for name in OWN if name in params}, "ModelRun")


@pytest.fixture(scope="module")
def raw(service: Service) -> Iterator[Raw]:
    """One connection for all."""
    with Raw(service.socket) as connected:
        yield connected


@pytest.mark.parametrize("changes", ANOTHER.values(), ids=ANOTHER)
def test_a_prepared_request_is_answered_as_one_sent_whole(
    service: Service, raw: Raw, changes: dict[str, Any]
) -> None:
    with Raw(service.socket) as fresh:
        expected = answered(fresh, GOOD | changes)
    for _ in range(2):
        assert prepared(raw, GOOD | changes) == expected
        assert prepared(raw, GOOD) == answered(raw, GOOD)


def test_numbers_belong_to_a_connection_and_are_bounded(service: Service, raw: Raw) -> None:
    whole = {name: each for name, each in GOOD.items() if name not in OWN}
    data = {"raw_input_contents": GOOD["raw_input_contents"]}

    def number(connected: Raw) -> dict[str, int]:
        told: dict[str, int] = answered(connected, whole, "ModelPrepare")
        return told

    def code(connected: Raw, told: dict[str, int]) -> Any:
        return answered(connected, told | data, "ModelRun").get("code")

    with Raw(service.socket) as other:
        first, theirs = number(other), number(raw)
        assert (code(other, first), code(raw, first), code(other, theirs)) == (None, *["NOT_PREPARED"] * 2)
        assert code(raw, {"number": 0}) == code(raw, {"number": 2**64 - 1}) == "NOT_PREPARED"
        many = [number(other) for _ in range(MOST_PREPARED)]
        assert len({each["number"] for each in many}) == MOST_PREPARED
        assert (code(other, first), code(other, many[0]), code(other, many[-1])) == (
            "NOT_PREPARED",
            None,
            None,
        )
        wrong: dict[str, Any]
        for wrong in ({}, {"number": None}, {"number": "1"}, {"number": -1}, {"number": 1.0}, {"numbr": 1}):
            assert code(other, wrong) in ("INVALID_ARGUMENT", "NOT_PREPARED")
    with Raw(service.socket) as again:
        assert code(again, many[-1]) == "NOT_PREPARED"


def test_clients_prepare_what_they_ask_for_again(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    perform = Client._perform

    def noting(self: Client, link: Any, ask: Any) -> Any:
        sent.append(ask.method.name)
        return perform(self, link, ask)

    monkeypatch.setattr(Client, "_perform", noting)
    expected = (X + np.arange(SIZE, dtype=np.float32) + 1).tolist()
    for _ in range(4):
        assert client.infer("small", {"x": X})["y"].tolist() == expected
    assert sent == ["ModelInfer", "ModelPrepare", "ModelRun", "ModelRun", "ModelRun"]
    sent.clear()
    client.close()  # the next connection knows none of its numbers
    for _ in range(3):
        assert client.infer("small", {"x": X})["y"].tolist() == expected
    assert sent == ["ModelRun", "ModelInfer", "ModelPrepare", "ModelRun", "ModelRun"]
    sent.clear()
    for _ in range(3):  # another form of request, which has a number of its own
        assert client.infer("small", {"x": X}, outputs=["y"])["y"].tolist() == expected
        assert client.infer("small", {"x": X})["y"].tolist() == expected
    assert sent.count("ModelPrepare") == 1


def test_what_one_client_keeps_does_not_grow(client: Client) -> None:
    for priority, timeout in itertools.product((1, 2, 3), range(1, 50)):
        client.infer("small", {"x": X}, priority=priority, timeout=timeout)
    assert len(client._known) <= 64


def test_both_clients_prepare(service: Service) -> None:
    async def numbers() -> list[int | None]:
        async with AsyncClient(service.socket) as client:
            for _ in range(3):
                assert (await client.infer("small", {"x": X}))["y"].shape == (SIZE,)
            return [each.number for each in client._known.values()]

    [number] = asyncio.run(numbers())
    assert number is not None


class Prepared(RuleBasedStateMachine):
    """Connections prepare and run while models, settings and regions come and go.

    Each run has the answer that the whole request has on another connection at that moment.
    """

    service: Service
    models: tuple[Path, Path]

    def __init__(self) -> None:
        super().__init__()
        self.connected: list[tuple[Raw, dict[int, dict[str, Any]]]] = []
        self.gone: list[int] = []
        self.admin = self.service.client()
        self.whole = Raw(self.service.socket)
        self.regions: dict[int, Region] = {}  # by connection

    @initialize()
    def begin(self) -> None:
        with self.service.client() as admin:
            for model in admin.models():
                admin.remove(model["name"])
        self.connect()

    @rule()
    def connect(self) -> None:
        if len(self.connected) < 3:
            self.connected.append((Raw(self.service.socket), {}))

    @rule(at=st.integers(0, 2))
    def close(self, at: int) -> None:
        if at < len(self.connected) > 1:
            raw, numbers = self.connected.pop(at)
            raw.socket.close()
            self.gone += numbers

    @rule(size=st.sampled_from((0, 1)), name=st.sampled_from(("a", "b")))
    def add(self, size: int, name: str) -> None:
        self.admin.add(self.models[size], name=name, replace=True)

    @rule(name=st.sampled_from(("a", "b")))
    def remove(self, name: str) -> None:
        if name in {model["name"] for model in self.admin.models()}:
            self.admin.remove(name)

    @rule(name=st.sampled_from(("a", "b")), delay=st.sampled_from((0, 4)))
    def change_settings(self, name: str, delay: int) -> None:
        """The number of rows is fixed in a compiled file, so a batch is refused and changes nothing."""
        if name in {model["name"] for model in self.admin.models()}:
            assert self.admin.set(name, batch_delay_us=delay)["batch_delay_us"] == delay
            with pytest.raises(InvalidArgument, match="cannot be run together"):
                self.admin.set(name, max_batch=4)
            assert self.admin.set(name)["max_batch"] == 0

    @rule(at=st.integers(0, 2), name=st.sampled_from(("a", "b")), size=st.sampled_from((SIZE, SIZE + 1)))
    def prepare(self, at: int, name: str, size: int) -> None:
        raw, numbers = self.connected[at % len(self.connected)]
        params = {"model_name": name, "inputs": [INPUT | {"shape": [size]}]}
        told = answered(raw, params, "ModelPrepare")
        if "number" in told:
            assert told["number"] not in numbers
            numbers[told["number"]] = params
        else:
            assert told["code"] == "NOT_FOUND"
            assert name not in {model["name"] for model in self.admin.models()}

    @rule(at=st.integers(0, 2), which=st.integers(0, 20))
    def run(self, at: int, which: int) -> None:
        raw, numbers = self.connected[at % len(self.connected)]
        if not numbers:
            return
        number = list(numbers)[which % len(numbers)]
        data = {"id": str(which), "raw_input_contents": [np.full(SIZE + which % 2, which, "f4").tobytes()]}
        run = answered(raw, {"number": number} | data, "ModelRun")
        assert run == answered(self.whole, numbers[number] | data)

    @rule(at=st.integers(0, 2))
    def run_anothers(self, at: int) -> None:
        raw, own = self.connected[at % len(self.connected)]
        others = [number for _, numbers in self.connected for number in numbers if number not in own]
        for number in (others + self.gone)[-3:]:
            assert answered(raw, {"number": number}, "ModelRun")["code"] == "NOT_PREPARED"

    @invariant()
    def clients_are_served(self) -> None:
        for name in ("a", "b"):
            for size in (SIZE, SIZE + 1):
                whole = answered(self.whole, {"model_name": name, **_of(size)})
                assert self._told(name, size) == whole.get("message", whole.get("raw_output_contents"))

    def _told(self, name: str, size: int) -> object:
        try:
            return [self.admin.infer(name, {"x": np.zeros(size, np.float32)})["y"].tobytes()]
        except HonedError as error:
            return str(error)

    def teardown(self) -> None:
        for raw, _ in self.connected:
            raw.socket.close()
        self.whole.socket.close()
        self.admin.close()


def _of(size: int) -> dict[str, Any]:
    return {"inputs": [INPUT | {"shape": [size]}], "raw_input_contents": [bytes(4 * size)]}


@pytest.mark.parametrize("examples", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_whatever_comes_and_goes(service: Service, small_model: Path, tmp_path: Path, examples: int) -> None:
    longer = add_constant(SIZE + 1).write(tmp_path / "longer.honed")
    machine = type("Machine", (Prepared,), {"service": service, "models": (small_model, longer)})
    few = settings(
        max_examples=examples,
        phases=[Phase.generate],
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(machine, settings=few)
    with service.client() as client:
        client.add(small_model, name="small", replace=True)  # which the machine removes


def test_regions_count_as_they_are_when_a_prepared_request_runs(service: Service, raw: Raw) -> None:
    place = {"shared_memory_region": "p", "shared_memory_offset": 0, "shared_memory_byte_size": X.nbytes}
    params = {"model_name": "small", "inputs": [INPUT | {"parameters": place}]}
    with Region("p", 4096) as region, Region("p", 8192) as another:

        def register(one: Region) -> None:
            known = {"name": "p", "byte_size": one.nbytes}
            assert raw.call("SystemSharedMemoryRegister", known, [one.descriptor])[2] is None

        def first() -> Any:
            told = answered(raw, number, "ModelRun")
            return told.get("code") or float(np.frombuffer(told["raw_output_contents"][0], np.float32)[0])

        number = answered(raw, params, "ModelPrepare")
        assert first() == "NOT_FOUND"
        register(region)
        for value in (1.0, 2.0):
            region.array("float32", (SIZE,), 0)[:] = value
            assert first() == value + 1
        assert raw.call("SystemSharedMemoryUnregister", {"name": "p"})[2] is None
        assert first() == "NOT_FOUND"
        another.array("float32", (SIZE,), 0)[:] = 7.0
        register(another)
        assert first() == 8.0
        assert raw.call("SystemSharedMemoryUnregister", {"name": "p"})[2] is None


def test_limits_that_change_count_for_prepared_requests(service: Service, tmp_path: Path) -> None:
    size = 4000
    with service.client() as client, Raw(service.socket) as raw:
        client.add(add_constant(size).write(tmp_path / "large.honed"), name="m")
        number = answered(raw, {"model_name": "m", "inputs": _of(size)["inputs"]}, "ModelPrepare")
        asked = number | {"raw_input_contents": [bytes(4 * size)]}
        for _ in range(2):
            assert len(answered(raw, asked, "ModelRun")["raw_output_contents"][0]) == 4 * size
        service.configure("[limits]\nmax_message_bytes = 4096\n" + NO_TUNER)
        assert "an answer may hold 8192" in answered(raw, asked, "ModelRun")["message"]
        service.configure(NO_TUNER)
        client.remove("m")
        with pytest.raises(NotFound):
            client.infer("m", {"x": np.zeros(size, np.float32)})
