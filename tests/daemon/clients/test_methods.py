"""The table of methods is what the service answers and what both clients call."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.daemon.features.beside import Beside
from honed.daemon.features.user_models import UserModels
from honed.daemon.methods.methods import _HANDLERS
from honed.protocol import methods, strict
from honed.protocol.errors import Internal, NotFound
from honed.protocol.methods import METHODS
from honed.protocol.params import ModelParams, Nothing, ProfileOptions, ProfileParams
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.operations import Operations
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw
from tests.daemon.running import Service

X = np.linspace(-3, 4, SIZE, dtype=np.float32)


def test_the_service_answers_what_the_table_has() -> None:
    features = [object.__new__(kind).methods() for kind in (UserModels, Beside)]
    assert {*_HANDLERS, *features[0], *features[1]} == METHODS.keys()


def test_both_clients_do_the_same() -> None:
    own = {"region", "sequence"}  # each gives one of its kind

    def public(kind: type) -> dict[str, inspect.Signature]:
        found = ((name, getattr(kind, name)) for name in dir(kind) if not name.startswith("_"))
        return {name: inspect.signature(each) for name, each in found if callable(each) and name not in own}

    assert public(Client) == public(AsyncClient)
    assert {"infer", "add", "profile", "run_tuner", "stop_tuner", "close"} <= public(Client).keys()
    assert all(name in dir(kind) for kind in (Client, AsyncClient) for name in own)
    assert all(
        inspect.iscoroutinefunction(getattr(AsyncClient, name))
        for name in public(AsyncClient)
        if name in vars(Operations)
    )
    assert (inspect.getdoc(Client.status) or "").startswith("Return the state of the service: ")


INPUT = {"name": "x", "datatype": "FP32", "shape": [SIZE]}
INFER = {"model_name": "rows", "inputs": [INPUT], "raw_input_contents": [X.tobytes()]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("ServerLive", {}),
    ("ServerReady", {}),
    ("ServerMetadata", {}),
    ("ModelInfer", INFER),
    ("LeaseAsk", {"candidate_seconds": 1.0}),
    ("ServerStatus", {}),
    ("LeaseRelease", {}),
    ("TunerReport", {"text": "at work", "tuning": {"trials": {"right": 1}, "faults": 0, "gains": {}}}),
    ("Metrics", {}),
    ("ConfigShow", {}),
    ("ConfigReload", {}),
    ("ModelReady", {"name": "rows"}),
    ("ModelMetadata", {"name": "rows"}),
    ("ModelStatistics", {}),
    ("ModelShow", {"name": "rows"}),
    ("ModelProfile", {"name": "rows", "parameters": {"runs": 1, "timeline": True}}),
    ("ModelExport", {"name": "rows"}),
    ("ModelHistory", {"name": "rows"}),
    ("ModelPin", {"name": "rows", "version": None}),
    ("ModelSet", {"name": "rows", "warm_up": 1}),
    ("SystemSharedMemoryStatus", {}),
    ("SystemSharedMemoryUnregister", {}),
    ("RepositoryIndex", {}),
    ("TunerRun", {"command": "faults"}),
    ("HintsExport", {}),
    ("Metrics", {}),
    ("RepositoryModelUnload", {"model_name": "rows"}),
]


@pytest.mark.service
@pytest.mark.opencl
def test_every_answer_is_what_its_row_says_and_no_more(service: Service, small_model: Path) -> None:
    with service.client() as client:
        client.add(small_model, name="rows")
    with Raw(service.socket) as raw:
        for method, params in CALLS:
            answer = raw.call(method, params)
            assert answer[2] is None, (method, answer)
            strict.from_plain(METHODS[method].result, answer[3], where=method)


@pytest.mark.service
@pytest.mark.opencl
def test_any_method_may_be_asked(client: Client, small_model: Path) -> None:
    assert client.ask(methods.SERVER_LIVE, Nothing()).live
    shown = client.ask(methods.MODEL_SHOW, ModelParams(name="small"))
    assert shown.inputs[0].shape == (SIZE,)
    assert shown.sha256 == client.show("small")["sha256"]
    wanted = ProfileParams(name="small", parameters=ProfileOptions(runs=1))
    assert client.ask(methods.MODEL_PROFILE, wanted, timeout=None).runs == 1
    with pytest.raises(NotFound):
        client.ask(methods.MODEL_SHOW, ModelParams(name="absent"))


def test_answers_of_other_services() -> None:
    assert methods.SERVER_READY.result_of({"ready": True, "of a later service": 1}).ready
    for nonsense in ({}, {"ready": 1}):
        with pytest.raises(Internal, match="no sense"):
            methods.SERVER_READY.result_of(nonsense)


STRANGER = """
import sys
from honed.runtime import Client
from honed.protocol.errors import PermissionDenied
client = Client(sys.argv[1])
assert client.live()
assert client.metadata()["name"] == "honed"
for call in (client.status, client.models, lambda: client.remove("small"), lambda: client.infer("small", {})):
    try:
        call()
    except PermissionDenied as error:
        print(error)
"""


@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_stranger_is_refused_with_a_reason(service: Service) -> None:
    service.socket.parent.chmod(0o755)
    code = f"import os; os.setgroups([]); os.setgid(54321); os.setuid(54321)\n{STRANGER}"
    # The interpreter's own folders may be closed to others, so everything is imported before becoming one.
    preload = "import honed.runtime.client, honed.runtime.aio, msgpack, numpy\n"
    done = subprocess.run(
        [sys.executable, "-c", preload + code, str(service.socket)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("user 54321 may not call" in line for line in lines)
