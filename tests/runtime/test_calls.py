"""What clients say, without a service: places, names, external data, arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from honed.protocol import strict
from honed.protocol.errors import Internal, InvalidArgument, MissingFiles, NotFound
from honed.protocol.methods import NAME
from honed.protocol.params import PrepareParams
from honed.runtime.calling import calls, files, rpc
from honed.runtime.calling.shared_memory import Region


def test_where_the_service_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "SYSTEM_SOCKET", "/proc/self/no-such-socket")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert rpc.default_socket({"HONED_SOCKET": "/x", "XDG_RUNTIME_DIR": "/r"}) == "/x"
    assert rpc.default_socket({"XDG_RUNTIME_DIR": "/r"}) == "/r/honed/honed.sock"
    assert rpc.default_socket({}) == "/proc/self/no-such-socket"
    with monkeypatch.context() as root:
        root.setattr(os, "geteuid", lambda: 0)  # whose service is the system's
        assert rpc.default_socket({"XDG_RUNTIME_DIR": "/r"}) == "/proc/self/no-such-socket"
    monkeypatch.setattr(rpc, "SYSTEM_SOCKET", "/proc/self/exe")
    assert rpc.default_socket({"XDG_RUNTIME_DIR": "/r"}) == "/proc/self/exe"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("m.onnx", "m"),
        ("a b(1).onnx", "a-b-1-"),
        (".x.onnx", "x"),
        ("ü.onnx", "model"),
        ("x" * 90, "x" * 64),
    ],
)
def test_names_made_from_files(file: str, name: str) -> None:
    assert files.model_name_for(Path(file)) == name
    assert NAME.fullmatch(files.model_name_for(Path(file)))


def test_arrays_in_a_region_are_named_and_others_sent() -> None:
    with Region("r1", 4096) as region:
        inside = region.array("float32", (4,))
        place = calls.place_of(inside, [region])
        arrays = {"a": inside, "b": np.arange(3)}
        call = calls.infer_call("m", arrays, {"y": place}, {"a": place}, calls.Asking())
    plain = strict.to_plain(call.params, omit_defaults=True)
    place = {"shared_memory_region": "r1", "shared_memory_offset": 0, "shared_memory_byte_size": 16}
    assert plain["inputs"][0]["parameters"] == place
    assert plain["inputs"][1] == {"name": "b", "datatype": "INT64", "shape": [3]}
    assert call.contents(arrays) == [np.arange(3).tobytes()]
    assert plain["outputs"] == [{"name": "y", "parameters": place}]
    assert call.shared == {"y"}


def test_scalars_empty_and_boolean_arrays() -> None:
    arrays = calls.portable(
        {"s": np.float32(2), "e": np.zeros((0, 3), np.float16), "b": np.array([True, False])}
    )
    call = calls.infer_call("m", arrays, None, {}, calls.Asking())
    assert [tensor.shape for tensor in call.params.inputs] == [(), (0, 3), (2,)]
    assert call.contents(arrays) == [b"\0\0\0\x40", b"", b"\x01\x00"]


def test_types_that_are_not_carried_are_refused() -> None:
    for value in (np.array([1j]), np.array([object()])):
        with pytest.raises(InvalidArgument, match=r"not supported|text is wanted"):
            calls.infer_call("m", {"x": value}, None, {}, calls.Asking()).contents({"x": value})


OUTPUT = {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {}}
RESULT = {
    "model_name": "m",
    "model_version": "1",
    "id": "",
    "parameters": {"queue_us": 1, "compute_us": 1, "engine": "cpu", "of a later service": 1},
    "outputs": [OUTPUT],
    "raw_output_contents": [b"12345678"],
}
CALL = calls.EncodedRequest(PrepareParams(model_name="m", inputs=()))


def test_a_result_becomes_arrays() -> None:
    for shape in ([2], [1, 2], [2]):
        outputs = [{**OUTPUT, "shape": shape}]
        answer = CALL.answer({**RESULT, "outputs": outputs, "of a later service": {}}, {})
        assert answer.outputs["y"].tobytes() == b"12345678"
        assert answer.outputs["y"].shape == tuple(shape)


@pytest.mark.parametrize(
    "result",
    [
        {},
        {**RESULT, "raw_output_contents": []},
        {**RESULT, "raw_output_contents": [b"123"]},
        {**RESULT, "outputs": [{**OUTPUT, "datatype": "FP99"}]},
        {**RESULT, "outputs": [{**OUTPUT, "shape": [-1, 3]}]},
        {**RESULT, "outputs": 3},
    ],
)
def test_results_that_make_no_sense(result: dict[str, object]) -> None:
    with pytest.raises(Internal):
        CALL.answer(result, {})


def missing(*names: str) -> MissingFiles:
    return MissingFiles("needs files", (), names)


def test_external_data_is_opened_beside_the_model_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    model = folder / "m.onnx"
    model.touch()
    (folder / "sub" / "w.bin").write_bytes(b"weights")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    opened = files.open_beside(model, missing("sub/w.bin"))
    assert os.pread(opened["sub/w.bin"], 10, 0) == b"weights"
    os.close(opened["sub/w.bin"])
    before = len(os.listdir("/proc/self/fd"))
    for name in ("../secret", str(tmp_path / "secret"), "link", "absent"):
        with pytest.raises(MissingFiles):
            files.open_beside(model, missing("sub/w.bin", name))
    assert len(os.listdir("/proc/self/fd")) == before


def test_why_external_data_is_not_sent_is_told_truly(tmp_path: Path) -> None:
    """Only what is not there is called missing."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = folder / "m.onnx"
    (folder / "w.bin").write_bytes(b"weights")
    (tmp_path / "store").write_bytes(b"weights")
    (folder / "link").symlink_to(tmp_path / "store")
    (folder / "loop").symlink_to("loop")
    for name, why in {
        "absent": "are missing beside it: absent; put them",
        "link": f"'link' cannot be sent: it is a link to '{tmp_path / 'store'}', out of the model's folder",
        "../store": "'../store' cannot be sent: it has a path that leads out",
        str(tmp_path / "store"): "cannot be sent: it has a path that leads out",
        "loop": "are missing beside it: loop; put them",
    }.items():
        with pytest.raises(MissingFiles) as told:
            files.open_beside(model, missing("w.bin", name))
        assert why in str(told.value)
        assert "w.bin" not in str(told.value)
        assert told.value.files == (name,)
    if os.geteuid():
        (folder / "w.bin").chmod(0)
        with pytest.raises(MissingFiles, match=r"cannot be read \(Permission denied\)"):
            files.open_beside(model, missing("w.bin"))


def test_external_data_beside_the_file_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for name in ("m.onnx", "w.bin"):
        (tmp_path / "blobs" / name).write_bytes(b"x")
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    opened = files.open_beside(tmp_path / "snapshot" / "m.onnx", missing("w.bin"))
    os.close(opened["w.bin"])


def test_models_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        files.open_model(tmp_path / "absent.onnx")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InvalidArgument):
        files.open_model(tmp_path / "loop")
