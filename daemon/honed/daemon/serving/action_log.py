"""Logs the actions of the core that report something."""

from __future__ import annotations

import logging

from honed.daemon.core import messages

_log = logging.getLogger(__name__)


def log_action(action: messages.Action) -> None:
    """Log an action, if it is one of those that report something."""
    match action:
        case messages.AttemptFailed(model, attempt, why):
            _log.error("model %s: attempt %d failed: %s", model, attempt, why)
        case messages.VersionRolledBack(model, left, served, why):
            message = "model %s: version %d is rolled back to %d and not served again: %s"
            _log.error(message, model, left, served, why)
        case messages.ModelUnavailable(model, why):
            _log.error("model %s is not served any more: %s", model, why)
        case messages.CanaryPromoted(model, version):
            _log.info("model %s: version %d has served cleanly", model, version)
        case messages.FailedOver(engine, other, models, why):
            message = "%s is lost (%s): %s stands in for it and serves %s"
            _log.error(message, engine, why, other, ", ".join(models))
        case messages.EngineReplaced(model, engine, other, why):
            _log.error("model %s is served by %s from now on, and not by %s: %s", model, other, engine, why)
        case messages.EngineChanged(model, engine, why):
            _log.info("model %s is to be served by %s from now on: %s", model, engine, why)
        case messages.Isolated(model, why):
            _log.error("model %s: %s", model, why)
        case messages.Rejoined(model):
            _log.info("model %s runs among the other models again", model)
        case messages.FailedBack(model, engine):
            _log.info("model %s is served by %s again", model, engine)
        case messages.FailbackRefused(model, engine, why):
            _log.error("model %s stays on %s: %s", model, engine, why)
