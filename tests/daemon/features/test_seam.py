"""A model that uses no feature is answered without any: features wrap only what uses them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon import assembly
from honed.daemon.core import messages
from honed.daemon.core.model import ServedModel
from honed.daemon.feature import Feature, FeatureRequest, Infer, MethodCall
from honed.daemon.features.batching import Batcher
from honed.daemon.features.sequences import SequenceFeature, SequenceSettings
from honed.daemon.features.sizes import SizeSpecialiser
from honed.daemon.features.user_models import UserModels
from honed.daemon.features.variants import ShapeVariants
from honed.daemon.methods.methods import Api
from honed.daemon.methods.pipeline import MOST_PREPARED, InferencePipeline
from honed.daemon.observe.statefile import StateFile
from honed.daemon.serving import plan
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.protocol.errors import (
    HonedError,
    InvalidArgument,
    ModelRefused,
    NotFound,
    NotPrepared,
    SequenceLost,
    Unimplemented,
)
from honed.protocol.params import (
    InferOptions,
    InputTensor,
    LoadOptions,
    LoadParams,
    PrepareParams,
    RunParams,
)
from honed.protocol.results import ModelSettings
from honed.protocol.strict import Map
from honed.protocol.values import PartitionInfo
from tests.daemon.changes.test_variants_keeper import Place
from tests.daemon.core.serving_world import given

X = TensorSpec(name="x", dtype="float32", shape=(3, 4))
STATIC = Interface(inputs=(X,), outputs=(X,), opset=17, producer="")
OPEN = dataclasses.replace(STATIC, inputs=(dataclasses.replace(X, shape=(-1, 4)),))
SIZED = PartitionInfo(engine="cpu", nodes=1, flops=1, sized=True)
FEATURES: tuple[Any, ...] = (UserModels, SequenceFeature, Batcher, ShapeVariants, SizeSpecialiser)


def model(
    interface: Interface = STATIC,
    parts: tuple[PartitionInfo, ...] = (),
    settings: ModelSettings | None = None,
    state: dict[str, str] | None = None,
) -> ServedModel:
    manifest = dataclasses.replace(
        given("m"), interface=interface, settings=settings or ModelSettings(), state=state or {}
    )
    compiled = cast(Any, SimpleNamespace(parts=parts, interface=interface, inputs=interface.inputs))
    return ServedModel(
        number=1, manifest=manifest, compiled=compiled, device="gpu", preferred_engine="gpu", engine="gpu"
    )


async def infer(_: Any) -> Any:
    raise AssertionError("nobody asks")


def keeping(variants: list[str]) -> Any:
    """What features keep of a service whose every model has these variants."""
    registry = SimpleNamespace(variants=lambda _: variants)
    return SimpleNamespace(registry=registry, in_turns=lambda *_: infer)


def wrapped(entry: ServedModel) -> set[str]:
    """The features that wrap a model which has no variants yet; else that is decided by the model alone."""
    nobody = keeping([])
    return {each.__name__ for each in FEATURES if each.wrap(nobody, entry, infer) is not None}


def test_a_plain_model_is_wrapped_by_nothing() -> None:
    assert wrapped(model()) == set()


@pytest.mark.parametrize(
    ("entry", "features"),
    [
        (model(settings=ModelSettings(max_batch=8)), {"Batcher"}),
        (model(state={"x": "x"}), {"SequenceFeature"}),
        (model(OPEN), {"ShapeVariants", "SizeSpecialiser"}),  # whose variants may have sized parts
        (model(parts=(SIZED,)), {"SizeSpecialiser"}),
    ],
    ids=["settings", "state", "open sizes", "sized parts"],
)
def test_what_uses_a_feature_is_wrapped_by_it(entry: ServedModel, features: set[str]) -> None:
    assert wrapped(entry) == features


@pytest.mark.parametrize("feature", [ShapeVariants, SizeSpecialiser])
def test_what_leaves_open_nobody_knows_is_wrapped_where_it_has_variants(feature: Any) -> None:
    entry = model()
    entry.manifest = dataclasses.replace(entry.manifest, interface=None)
    for variants, wraps in (([], False), (["m@3"], True)):
        assert (feature.wrap(keeping(variants), entry, infer) is not None) is wraps


def refused(options: InferOptions) -> HonedError:
    """Why a request with these options is refused, for a model without state."""
    given = PrepareParams(model_name="m", inputs=(), parameters=options)
    with pytest.raises(HonedError) as raised:
        plan.check(given, STATIC, None, cast(Any, None), max_bytes=1 << 20, keep=False)
    return raised.value


def test_a_model_without_state_takes_no_sequence() -> None:
    begun = refused(InferOptions(sequence_id=1, sequence_start=True))
    assert isinstance(begun, InvalidArgument)
    assert "--state OUT=IN" in str(begun)
    for ends in (None, True):  # begun perhaps with a model that had state, and was replaced since
        assert isinstance(refused(InferOptions(sequence_id="a", sequence_end=ends)), SequenceLost)
    unnamed = refused(InferOptions(sequence_start=True))
    assert isinstance(unnamed, InvalidArgument)
    assert "need a sequence_id" in str(unnamed)


def test_features_are_asked_once_for_each_version_and_its_settings(tmp_path: Path) -> None:
    place = Place(tmp_path, ModelRefused("no"))
    asked: list[int] = []

    class Nothing(Feature):
        def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
            asked.append(entry.manifest.settings.max_batch)
            return None

        def forget(self, model: str) -> None:
            raise AssertionError

    nobody = cast(Any, None)
    pipeline = InferencePipeline(
        limits=nobody,
        registry=place.registry,
        pool=nobody,
        leasing=nobody,
        usage_log=nobody,
        features=(Nothing(), Nothing()),
    )
    entry = place.registry.get("m")
    for _ in range(3):
        assert pipeline._of(entry).infer == pipeline._run
    assert len(asked) == 2
    batched = dataclasses.replace(entry.manifest, settings=ModelSettings(max_batch=4))
    place.handle(messages.ManifestChanged(entry.number, batched))
    for _ in range(3):
        assert pipeline._of(place.registry.get("m")).infer == pipeline._run
    assert asked[2:] == [4, 4]


def test_what_was_found_out_of_a_prepared_request_is_kept_for_its_runs(tmp_path: Path) -> None:
    place = Place(tmp_path, ModelRefused("no"))
    asked: list[FeatureRequest] = []
    found: list[object] = []

    class Noting(Feature):
        def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
            async def note(call: FeatureRequest) -> Map:
                asked.append(call)
                call.compute_once("what", call.entry.manifest.settings, lambda: found.append(call.id))
                return {"id": call.id}

            return note

    pipeline = InferencePipeline(
        limits=Limits(),
        registry=place.registry,
        pool=cast(Any, None),
        leasing=cast(Any, None),
        usage_log=place.ledger,
        features=(Noting(),),
    )
    closing: list[Callable[[], object]] = []
    connections = [SimpleNamespace(number=n, when_closed=closing.append) for n in (1, 2)]
    tensor = InputTensor(name="x", datatype="FP32", shape=(1,))
    params = PrepareParams(model_name="m", inputs=(tensor,))

    def run(number: int, name: str, connection: int = 0) -> Map:
        call = MethodCall(connection=cast(Any, connections[connection]), msgid=1, descriptors=[])
        answers: list[Map] = []
        work = pipeline.run(call, RunParams(number=number, id=name, raw_input_contents=(b"abcd",)))
        work.begin(lambda result, error: answers.append(result or {"error": error}))
        return answers[0]

    def prepare(connection: int = 0) -> int:
        return asyncio.run(pipeline.prepare(cast(Any, connections[connection]), params)).number

    number = prepare()
    assert [run(number, name)["id"] for name in ("one", "two", "")] == ["one", "two", ""]
    assert (asked[1].data, asked[1].params, found) == ((b"abcd",), params, ["one"])
    entry = place.registry.get("m")
    batched = dataclasses.replace(entry.manifest, settings=ModelSettings(max_batch=4))
    place.handle(messages.ManifestChanged(entry.number, batched))
    assert run(number, "three")["id"] == "three"
    assert found == ["one", "three"]  # what it depends on has changed
    with pytest.raises(NotPrepared):
        run(number, "", connection=1)
    other = prepare(connection=1)
    assert other != number
    closing[1]()
    with pytest.raises(NotPrepared):
        run(other, "", connection=1)
    numbers = [prepare() for _ in range(MOST_PREPARED)]
    with pytest.raises(NotPrepared):
        run(number, "")
    assert run(numbers[0], "oldest")["id"] == "oldest"
    place.handle(messages.Removed("m"))
    assert isinstance(run(numbers[0], "")["error"], NotFound)


def test_files_of_features_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, ModelRefused("no"))
    threads: list[threading.Thread] = []
    monkeypatch.setattr(StateFile, "read", lambda _: threads.append(threading.current_thread()))
    config: Any = SimpleNamespace(
        limits=SimpleNamespace(load_seconds=1.0),
        serve=SimpleNamespace(engine="fastest"),
        service=SimpleNamespace(state_dir=tmp_path),
        sequences=SequenceSettings(),
    )
    parts = dict.fromkeys(("changes", "installer", "leasing", "usage_log", "store"))
    base: Any = SimpleNamespace(config=config, registry=place.registry, pool=SimpleNamespace(), **parts)
    pipeline: Any = SimpleNamespace(rewrap=None, plan=None)
    reloader: Any = SimpleNamespace(config=config)
    asyncio.run(assembly._features(base, reloader, cast(Any, None), pipeline))
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_variants_are_refused_where_no_feature_makes_them() -> None:
    class Nothing(Feature):
        pass

    api: Any = SimpleNamespace(features=(Nothing(),))
    params = LoadParams(model_name="m", files=("m.onnx",), parameters=LoadOptions(variants=({"x": (2,)},)))
    with pytest.raises(Unimplemented, match="compiles no variants"):
        asyncio.run(Api._repository_load(api, cast(Any, None), params))
