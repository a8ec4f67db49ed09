"""A model as ModelShow has it. No I/O."""

from __future__ import annotations

from typing import Any

from honed.protocol import strict
from honed.protocol.errors import Unavailable

from .inference import describe
from .interface import Interface
from .serving.states import ServedModel


def show(entry: ServedModel, identity: dict[str, Any] | None) -> dict[str, Any]:
    """The result of ModelShow but `placement`; `identity` is of the engine that serves it, once known.

    Raises Unavailable where the file is not readable.
    """
    model, manifest = entry.compiled, entry.manifest
    if model is None and entry.on_cpu and manifest.interface is not None and identity is not None:
        return _as_given(entry, manifest.interface, identity)
    if model is None or manifest.compiled is None:
        raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
    plain = strict.to_plain(model)
    source = plain["source"]
    notes = source.pop("notes")
    return {
        "name": entry.name,
        "state": entry.state.value,
        "reason": entry.remark,
        "sha256": manifest.compiled.sha256,
        "bytes": manifest.compiled.nbytes,
        "added": manifest.added,
        "source": source,
        "shapes": {name: list(shape) for name, shape in manifest.shapes.items()},
        "precision": manifest.precision,
        "notes": notes,
        "inputs": [strict.to_plain(describe(tensor)) for tensor in model.inputs],
        "outputs": [strict.to_plain(describe(tensor)) for tensor in model.outputs],
        "checked": entry.checked,
        **{key: plain[key] for key in _SHOWN},
    }


def _as_given(entry: ServedModel, interface: Interface, identity: dict[str, Any]) -> dict[str, Any]:
    """A model without a compiled form."""
    manifest = entry.manifest
    source = manifest.sources[0]
    return {
        "name": entry.name,
        "state": entry.state.value,
        "reason": entry.remark,
        "sha256": source.sha256,
        "bytes": sum(file.nbytes for file in manifest.sources),
        "added": manifest.added,
        "source": {
            "sha256": source.sha256,
            "filename": source.name,
            "producer": interface.producer,
            "opset": interface.opset,
            "precision": "as given",
            "choice": None,
        },
        "shapes": {name: list(shape) for name, shape in manifest.shapes.items()},
        "precision": manifest.precision,
        "notes": [],
        "inputs": [strict.to_plain(describe(tensor)) for tensor in interface.inputs],
        "outputs": [strict.to_plain(describe(tensor)) for tensor in interface.outputs],
        "checked": None,
        "compiler": {},
        "device": identity,
        "proof": None,
        "kernels": [],
        **dict.fromkeys(_SHOWN[4:], 0),
    }


_SHOWN = (
    "compiler",
    "device",
    "proof",
    "kernels",
    "launches",
    "copies",
    "host_calls",
    "constant_bytes",
    "arena_bytes",
    "prepared_bytes",
)
