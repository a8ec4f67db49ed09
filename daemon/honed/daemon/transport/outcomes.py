"""What the work for a request may give: a result, open descriptors with it, or an error."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Generic, TypeVar

from honed.protocol.errors import HonedError, Internal

R = TypeVar("R")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WithDescriptors(Generic[R]):
    """A result that open descriptors go along with; the connection closes them when they are sent."""

    result: R
    descriptors: tuple[int, ...]


def as_error(method: str, failure: BaseException) -> HonedError:
    """What a client is told of a failure; a bug in one method must not end the service."""
    if isinstance(failure, HonedError):
        return failure
    _log.error("%s failed", method[:80], exc_info=failure)
    return Internal(f"the service failed in {method[:80]} ({failure!r:.200}); its log says more")
