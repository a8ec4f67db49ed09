"""What the tuner remembers between starts: a small file beside the records."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from honed.machine.files import replacing
from honed.protocol import strict
from honed.protocol.errors import HonedError

from .choice import Known

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    models: dict[str, Known]


class TuningState:
    """`Known` by model. Losing it costs nothing but the time to find out again that a model is finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models = self._read()

    def get(self, name: str, key: str) -> Known:
        """What is known of a model as `key` says it is now; anew where that has changed."""
        known = self._models.get(name)
        return known if known is not None and known.key == key else Known(key=key)

    def put(self, name: str, known: Known) -> None:
        """Remember; a disk that is full is said."""
        self._models[name] = known
        try:
            with replacing(self._path) as file:
                file.write(json.dumps(strict.to_plain(_File(models=self._models)), indent=1).encode())
        except HonedError as error:
            _log.warning("what was tuned is not remembered: %s", error)

    def _read(self) -> dict[str, Known]:
        try:
            plain = json.loads(self._path.read_bytes())
            return dict(strict.from_plain(_File, plain, where=self._path.name, none_omitted=True).models)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning(
                "%s cannot be read (%s): models that were tuned are looked at again", self._path, error
            )
            return {}
