"""What changes are refused for, and who may see them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.changes.change import Changes
from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import Added
from honed.daemon.core.state import Registry
from honed.daemon.settings.schema import Limits
from honed.runtime.errors import ResourceExhausted
from tests.daemon.conftest import SIZE
from tests.daemon.running import NO_TUNER, Service
from tests.daemon.stubs import StubTuner
from tests.runtime.builder import add_constant

from .test_proof_cache import manifest


@pytest.mark.service
@pytest.mark.opencl
def test_a_full_store_refuses_new_models_and_no_other_change(
    stub_service: Service, small_model: Path
) -> None:
    stub_service.configure("[limits]\nmax_models = 1\nmax_jobs = 1\n" + NO_TUNER)
    with stub_service.client() as client:
        client.add(small_model, name="a")
        client.set("a", warm_up=1)
        client.pin("a")
        client.pin("a", 0)
        client.add(small_model, name="a", replace=True)
        with pytest.raises(ResourceExhausted, match="the store holds its 1 models; remove one first"):
            client.add(small_model, name="b")
        assert [model["name"] for model in client.models()] == ["a"]
        client.remove("a")
    stub_service.configure(NO_TUNER)


@pytest.mark.parametrize("owner", [None, 1000])
def test_a_change_of_what_is_stored_is_its_owners_and_no_addition(tmp_path: Path, owner: int | None) -> None:
    nothing, models = cast(Any, None), Registry()
    stored = dataclasses.replace(manifest(), owner=owner)
    Machine(models, ("",), "", 1).handle(
        Added(manifest=stored, compiled=nothing, preferred_engine="", proof=None), 0.0, 0.0
    )
    changes = Changes(Limits(max_models=1, max_jobs=1), nothing, models, nothing, nothing, nothing, tmp_path)

    async def go() -> None:
        async with changes.begin(stored.name) as change:
            assert (change.owner, changes.adding) == (owner, 0)
            async with changes.begin("new", owner=7) as other:
                assert (other.owner, changes.adding) == (7, 0)
            if owner is not None:  # Models of users do not count
                async with changes.begin("new", adds=True):
                    assert changes.adding == 1
                    with pytest.raises(ResourceExhausted, match="1 models are being added already"):
                        async with changes.begin("newer", adds=True):
                            pass

    asyncio.run(go())


@pytest.mark.service
@pytest.mark.opencl
def test_what_must_be_compiled_is_compiled_though_onnx_runtime_is_faster(
    tmp_path: Path, stub: StubTuner, stub_service: Service
) -> None:
    heard, source = tmp_path / "heard", tmp_path / "m.onnx"
    nodes = [helper.make_node("Add", ["x", "one"], ["y"])]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph(nodes, "m", [x], [y], [one]), ir_version=8), source)
    stub.knows(source, add_constant(SIZE))
    stub.first(source, f"pathlib.Path({str(heard)!r}).write_text(json.dumps(sys.argv))\n")
    with stub_service.client() as client:
        client.add(source, name="m", engine="opencl")
        assert "--keep-slower" in json.loads(heard.read_text())
        client.add(source, name="m", engine="fastest", replace=True)
        assert "--keep-slower" not in json.loads(heard.read_text())
