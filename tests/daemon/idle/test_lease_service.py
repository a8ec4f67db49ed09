"""The lease over the socket: a real daemon, real tuners in processes of their own, real requests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import METHODS, Permission
from honed.runtime import Client
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.tool.main import main
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw
from tests.daemon.running import DEADLINE, IDLE, NO_TUNER, Made, Service, serving, state_with, wait_for

from .lease_holder import Tuner

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = {"x": np.ones(SIZE, np.float32)}
LEASED = IDLE + f"max_candidate_seconds = {DEADLINE:g}\n"


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, made_once: Made, small_model: Path
) -> Iterator[Service]:
    """For all tests here, whose tuners are gone when they end."""
    stored = state_with(made_once, small_model, cache_dir)
    with serving(tmp_path_factory, cache_dir, config=LEASED, stored=stored) as running:
        yield running


def lease(client: Client) -> dict[str, Any]:
    part: dict[str, Any] = client.status()["lease"]
    return part


def test_only_who_may_change_models_may_ask() -> None:
    assert METHODS["LeaseAsk"].right is METHODS["LeaseRelease"].right is Permission.CHANGE


def test_a_request_comes_first_and_the_lease_comes_back(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    with service.client() as client, Tuner(service.socket, DEADLINE) as tuner:
        assert tuner.do("wait 60") == {"granted": True, "may": True, "why": ""}
        held = lease(client)
        assert (held["state"], held["holder"]["pid"]) == ("granted", tuner.process.pid)
        assert held["holder"]["candidate_seconds"] == DEADLINE
        released, revoked, granted = held["release"]["count"], held["revoked"], held["granted"]
        tuner.say("until revoked")
        client.infer("small", X)
        assert lease(client)["state"] == "revoking", "the answer did not wait for the tuner"
        told = tuner.hear()
        assert told["may"] is False
        assert "small" in told["why"]
        assert main(["--socket", str(service.socket), "status"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"held by process {tuner.process.pid} " in text
        assert "told to leave" in text
        tuner.do("release")
        after = lease(client)
        assert (after["state"], after["holder"], after["revoked"]) == ("free", None, revoked + 1)
        assert after["release"]["count"] == released + 1
        assert 0 < after["release"]["p50_ms"] <= after["release"]["max_ms"]
        assert after["release"]["buckets"][-1] == {"le_seconds": None, "count": released + 1}
        assert tuner.do("wait 60")["granted"], "pushed when the machine is idle again"
        assert lease(client)["granted"] == granted + 1
        assert client.status()["idle"]["models"]["small"] > 0.2


def test_a_killed_tuner_frees_the_lease_for_the_next(service: Service) -> None:
    with (
        service.client() as client,
        Tuner(service.socket, 1.0) as first,
        Tuner(service.socket, 1.0) as second,
    ):
        assert first.do("wait 60")["granted"]
        waits = second.do("wait 0.1")
        assert (waits["granted"], waits["why"]) == (False, "another tuner has the lease")
        second.say("wait 60")
        wait_for(lambda: lease(client)["waiting"] == 1, "the second tuner to wait")
        first.process.send_signal(signal.SIGKILL)
        assert second.hear()["granted"]
        assert lease(client)["holder"]["pid"] == second.process.pid


def test_a_tuner_that_stays_is_named_and_requests_go_on(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    with service.client() as client, Tuner(service.socket, 0.1) as tuner:
        assert tuner.do("wait 60")["granted"]
        overdue = lease(client)["overdue"]
        client.infer("small", X)
        wait_for(lambda: lease(client)["state"] == "overdue", "the tuner to be overdue", service)
        assert client.infer("small", X)["y"][0] == 2.0
        assert lease(client)["overdue"] == overdue + 1
        assert f"process {tuner.process.pid}, still has the device 0.1 s after" in service.log
        assert main(["--socket", str(service.socket), "status"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"held by process {tuner.process.pid} " in text
        assert "overdue: it promised 0.1 s" in text
        assert tuner.do("wait 60")["granted"], "it releases what was revoked before it asks again"


def test_a_busy_machine_grants_nothing_until_it_is_idle(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = LEASED + "enabled = false\n" + NO_TUNER
    service.configure(busy)
    with service.client() as client, Tuner(service.socket, 1.0) as tuner:
        refused = tuner.do("wait 0.1")
        assert (refused["granted"], refused["why"]) == (False, "tuning is switched off ([idle] enabled)")
        idle = client.status()["idle"]
        assert (idle["idle"], idle["why"]) == (False, refused["why"])
        assert {r["signal"] for r in idle["readings"]} >= {"requests", "load", "gpu", "power", "window"}
        assert all(set(r) == {"signal", "value", "unit", "verdict", "text"} for r in idle["readings"])
        assert main(["--socket", str(service.socket), "status"]) == 0
        text = capsys.readouterr().out
        assert "switched off" in " ".join(text.split())
        assert any(line.split()[:1] == ["load"] for line in text.splitlines())
        service.write_configuration(LEASED + NO_TUNER)
        tuner.say("wait 60")
        with Raw(service.socket) as raw:
            assert raw.call("ConfigReload", {})[2] is None
        assert tuner.hear()["granted"]
        # And the other way round: the lease ends with the idleness.
        tuner.say("until revoked")
        service.write_configuration(busy)
        service.process.send_signal(signal.SIGHUP)
        assert "switched off" in tuner.hear()["why"]
    service.configure(LEASED + NO_TUNER)


def test_bounds_that_are_not_allowed(service: Service) -> None:
    for bound in (0.0, -1.0, DEADLINE + 0.5, float("nan"), float("inf")):
        with (
            LeaseHolder(bound, socket=service.socket) as holder,
            pytest.raises(InvalidArgument, match=rf"candidate_seconds is .* at most {DEADLINE:g}$"),
        ):
            holder.wait_until_granted(1.0)
        assert not holder.may_run()


def test_a_tuners_own_requests_do_not_interrupt_it(service: Service, small_model: Path) -> None:
    with LeaseHolder(1.0, socket=service.socket) as holder, service.client() as client:
        assert holder.wait_until_granted(60.0)
        revoked = lease(client)["revoked"]
        client.infer("small", X)
        client.add(small_model, name="small", replace=True)
        assert holder.may_run()
        assert lease(client)["revoked"] == revoked
        holder.release()
        assert lease(client)["state"] == "free"


def test_adding_a_model_comes_first_too(service: Service, small_model: Path) -> None:
    with service.client() as client, Tuner(service.socket, 1.0) as tuner:
        assert tuner.do("wait 60")["granted"]
        tuner.say("until revoked")
        client.add(small_model, name="other")
        assert "added" in tuner.hear()["why"]


def test_a_tuner_finds_a_service_that_was_killed_and_started_again(
    start_service: Callable[..., Service],
) -> None:
    service = start_service(config=IDLE)
    with LeaseHolder(1.0, socket=service.socket) as holder:
        assert holder.wait_until_granted(60.0)
        service.kill()
        assert not holder.may_run(), "without a service there is no lease"
        assert not holder.wait_until_granted(0.05)
        assert "no service answers" in holder.why
        holder.release()
        start_service(config=IDLE, socket=service.socket)
        assert holder.wait_until_granted(60.0)
