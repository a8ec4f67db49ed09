"""What users' own models may take: whose goes, whose is compiled next, what they are called. Pure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from honed.daemon.feature import MethodCall
from honed.daemon.features.user_models import (
    DAY,
    IN_USE_SECONDS,
    AppsSettings,
    QuotaFile,
    UserModelUsage,
    UserQuotas,
    going,
    next_user,
)
from honed.daemon.methods.methods import Api, _Row
from honed.daemon.store.names import NOBODYS, Viewer, is_own, naming_field, own_name, with_model_name
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.methods import METHODS, NAME
from honed.protocol.params import ModelParams, RegionName, UploadOptions, UploadParams

MIB = 1 << 20
SETTINGS = AppsSettings(max_users=3, max_models=4, disk_mib=100, memory_mib=256)
USERS = st.integers(1, 4)


def model(name: str, user: int, used: float, *, mib: int = 1) -> UserModelUsage:
    return UserModelUsage(name=name, user=user, nbytes=mib * MIB, memory=mib * MIB, used=used)


class Quotas(RuleBasedStateMachine):
    """Users bring models of any size in any order; what must hold does, whatever they do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.kept: dict[str, UserModelUsage] = {}
        self.made = 0

    @rule(seconds=st.sampled_from([1.0, IN_USE_SECONDS, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(user=USERS, mib=st.integers(1, 130))
    def bring(self, user: int, mib: int) -> None:
        self.made += 1
        new = model(f"m{self.made}", user, self.now, mib=mib)
        try:
            leaving = going(new, list(self.kept.values()), SETTINGS)
        except ResourceExhausted as error:
            self.refused(new, str(error))
            return
        gone = [self.kept.pop(name) for name in leaving]
        assert all(each.user == user and self.now - each.used >= IN_USE_SECONDS for each in gone)
        left = [each for each in self.kept.values() if each.user == user]
        assert all(one.used <= other.used for one in gone for other in left), "the longest unused go"
        if gone:  # one less would not have been enough
            with_last = [*left, gone[-1], new]
            assert len(with_last) > SETTINGS.max_models or nbytes(with_last) > SETTINGS.disk_bytes
        self.kept[new.name] = new

    def refused(self, new: UserModelUsage, told: str) -> None:
        own = [each for each in self.kept.values() if each.user == new.user]
        lately = [each for each in own if self.now - each.used < IN_USE_SECONDS]
        if "apps.max_users" in told:
            assert not own
            assert len({each.user for each in self.kept.values()}) == SETTINGS.max_users
        elif "last minute" in told:
            assert len(lately) >= SETTINGS.max_models or nbytes([*lately, new]) > SETTINGS.disk_bytes
        else:
            assert new.nbytes > SETTINGS.disk_bytes

    @rule(pick=st.integers(0, 9))
    def use(self, pick: int) -> None:
        if self.kept:
            name = sorted(self.kept)[pick % len(self.kept)]
            self.kept[name] = model(name, self.kept[name].user, self.now, mib=self.kept[name].nbytes >> 20)

    @rule(pick=st.integers(0, 9))
    def remove(self, pick: int) -> None:
        if self.kept:
            del self.kept[sorted(self.kept)[pick % len(self.kept)]]

    @invariant()
    def nobody_has_too_much(self) -> None:
        users = {each.user for each in self.kept.values()}
        assert len(users) <= SETTINGS.max_users
        for user in users:
            own = [each for each in self.kept.values() if each.user == user]
            assert len(own) <= SETTINGS.max_models
            assert nbytes(own) <= SETTINGS.disk_bytes


def nbytes(models: list[UserModelUsage]) -> int:
    return sum(each.nbytes for each in models)


TestQuotas = Quotas.TestCase
TestQuotas.settings = settings(stateful_step_count=40)


def test_memory_is_a_quota_of_its_own() -> None:
    kept = [UserModelUsage(name="a", user=1, nbytes=1, memory=200 * MIB, used=0.0)]
    new = UserModelUsage(name="b", user=1, nbytes=1, memory=100 * MIB, used=1000.0)
    assert going(new, kept, SETTINGS) == ("a",)
    with pytest.raises(ResourceExhausted, match=r"apps\.memory_mib"):
        going(UserModelUsage(name="b", user=1, nbytes=1, memory=300 * MIB, used=1000.0), kept, SETTINGS)


@given(
    events=st.lists(
        st.tuples(USERS, st.floats(0, 600), st.floats(0, DAY / 3)),
        max_size=30,
    )
)
def test_nobody_is_compiled_for_more_than_a_day_allows(events: list[tuple[int, float, float]]) -> None:
    """Whoever waits is next some time: the one with least, unless the day's time is spent."""
    shares, now = UserQuotas(), 0.0
    bounds = AppsSettings(compile_seconds=1000.0)
    for user, seconds, pause in events:
        now += pause
        left = {each: shares.seconds_left(each, bounds, now) for each in range(1, 5)}
        chosen = next_user(dict.fromkeys(range(1, 5), 0.0), shares, bounds, now)
        assert chosen is None or left[chosen] == max(left.values()) > 0
        assert chosen is not None or not any(left.values())
        if left[user] > 0:
            shares.count_compile_seconds(user, seconds, now)
            assert shares.seconds_spent(user, now) <= bounds.compile_seconds + seconds
    assert shares.seconds_left(1, bounds, now + 2 * DAY) == 1000.0
    again = strict.from_plain(UserQuotas, json.loads(json.dumps(strict.to_plain(shares))), where="shares")
    assert again == shares


def test_a_hostile_user_does_not_keep_others_from_compiling() -> None:
    """One who always has something waiting gets no more than the one who comes now and then."""
    shares, bounds, now = UserQuotas(), AppsSettings(compile_seconds=10_000.0), 0.0
    for turn in range(100):
        waiting = {1: 0.0, 2: now} if turn % 2 else {1: 0.0}
        user = next_user(waiting, shares, bounds, now)
        assert user is not None
        if 2 in waiting:
            assert user == 2 or shares.seconds_spent(2, now) >= shares.seconds_spent(1, now)
        shares.count_compile_seconds(user, 10.0, now)
        now += 10.0


def test_what_was_used_is_known_after_a_restart(tmp_path: Path) -> None:
    import asyncio

    kept = QuotaFile(tmp_path / "apps.json")
    kept.shares.use("own-a", 5.0)
    kept.shares.use("own-b", 6.0)
    kept.shares.count_compile_seconds(7, 3.0, 100.0)

    async def stopped() -> None:
        keeping = asyncio.ensure_future(kept.keep())
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(stopped())
    again = QuotaFile(tmp_path / "apps.json").shares
    again.keep_only(["own-b"], 200.0)
    assert (again.used, again.seconds_spent(7, 200.0)) == ({"own-b": 6.0}, 3.0)
    again.keep_only([], 100.0 + DAY)
    assert again == UserQuotas()
    (tmp_path / "apps.json").write_text("nonsense")
    assert QuotaFile(tmp_path / "apps.json").shares == UserQuotas()
    assert (tmp_path / "apps.json.damaged").read_text() == "nonsense"


def bringing(*digests: str, **options: object) -> UploadParams:
    names = tuple(f"f{number}" for number in range(len(digests)))
    return UploadParams(files=names, sha256=digests, parameters=UploadOptions(**options) if options else None)  # type: ignore[arg-type]


def test_names_are_of_user_contents_and_options() -> None:
    name = own_name(1, bringing("a", "b"))
    assert is_own(name)
    assert NAME.fullmatch(name)
    assert own_name(1, bringing("a", "b", precision="auto", engine="fastest", shapes={})) == name
    renamed_model = UploadParams(files=("other", "f1"), sha256=("a", "b"))
    assert own_name(1, renamed_model) == name
    others = [
        own_name(2, bringing("a", "b")),
        own_name(1, bringing("a")),
        own_name(1, bringing("b", "a")),
        own_name(1, bringing("a", "b", precision="fp32")),
        own_name(1, bringing("a", "b", engine="cpu")),
        own_name(1, bringing("a", "b", shapes={"x": (1, 2)})),
        own_name(1, UploadParams(files=("f0", "other"), sha256=("a", "b"))),
    ]
    assert len({name, *others}) == 1 + len(others)
    assert is_own(f"{name}@2x3")
    assert not any(map(is_own, ("own-1", "small", f"x{name}", name.upper())))


def test_every_parameter_that_names_a_model_is_known() -> None:
    """Whatever has such a field is looked at, or said to name none: a method that is to come, too."""
    for row in METHODS.values():
        fields = {"name", "model_name", "model"} & set(row.params.__dataclass_fields__)
        if not fields or row.name == "RepositoryModelLoad" or "SharedMemory" in row.name:
            continue
        assert {naming_field(row.params)} == fields, row.name
    assert naming_field(RegionName) is None
    assert with_model_name(ModelParams(name=NOBODYS), "name", "a") == ModelParams(name="a")


@pytest.mark.parametrize("uid", [1, 0])
def test_a_model_that_comes_while_a_request_waits_is_nobodys(uid: int) -> None:
    """A handler runs a turn after the name was checked: what came in between may be another user's."""
    name = own_name(2, UploadParams(files=("f",), sha256=("a",)))
    asked: dict[str, str | None] = {}

    async def handler(_: MethodCall, params: Any) -> None:
        field = naming_field(type(params))
        asked[row.name] = getattr(params, field) if field is not None else None

    api = object.__new__(Api)
    api.registry = Mock(find=Mock(return_value=None))  # when the request comes, nobody has brought it
    api.policy = Mock(viewer=Mock(return_value=Viewer(uid, all=uid == 0)))
    api.pipeline = Mock(start_cached=Mock(return_value=None))
    api._rows = {row.name: _Row.of(row, handler) for row in METHODS.values()}
    for row in METHODS.values():
        for field in {"name", "model_name", "model"} & set(row.params.__dataclass_fields__):
            params: dict[str, object] = {field: name}
            with suppress(InvalidArgument):  # what asks for more than a name
                work = api.answer(Mock(peer=Mock(uid=uid)), Mock(method=row.name, params=params))
                assert isinstance(work, Coroutine)
                asyncio.run(work)
    assert {"ModelHistory", "ModelProfile", "RepositoryModelUnload"} <= set(asked)
    row = METHODS["ModelHistory"]
    work = api.answer(Mock(peer=Mock(uid=uid)), Mock(method=row.name, params={"name": "small"}))
    assert isinstance(work, Coroutine)
    asyncio.run(work)
    assert asked.pop(row.name) == "small", "a name that is nobody's own is not looked at"
    assert {found for found in asked.values() if found} == {name if uid == 0 else NOBODYS}


def test_who_sees_what() -> None:
    root, anna = Viewer(0, all=True), Viewer(1, all=False)
    assert [root.sees(owner) for owner in (None, 1, 2)] == [True] * 3
    assert [anna.sees(owner) for owner in (None, 1, 2)] == [True, True, False]
    text = f"tuning {NOBODYS} and own-{'1' * 40}@2"
    assert root.hide_names(text, frozenset()) == text
    assert anna.hide_names(text, frozenset({NOBODYS})) == f"tuning {NOBODYS} and a model of a user@2"
