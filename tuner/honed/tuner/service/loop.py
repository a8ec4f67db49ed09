"""Tunes in a loop: wait for the lease, choose a model, tune it for a while."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from honed.protocol.errors import (
    DeadlineExceeded,
    HonedError,
    ModelRefused,
    NotFound,
    Unavailable,
)
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.client import Client
from honed.tuner.measure.candidate import CANDIDATE_SECONDS

from .choice import PROFILE_SECONDS, PassPlan, Unprofiled, after_failure, after_pass, choose
from .view import TunerView, figures_in, look

REST_SECONDS = 20.0  # Seconds between two looks at the service while nothing is to be tuned
_SLICE_SECONDS = 0.5
STOP_SECONDS = 15.0  # Seconds within which a session ends after a signal
_log = logging.getLogger(__name__)


class Tuner:
    """A tuner of the models of one service; it runs until `stop`."""

    def __init__(self, socket: str | None) -> None:
        """Set up; with `socket` None use honed's default socket."""
        self._socket = socket
        self._lease = LeaseHolder(CANDIDATE_SECONDS, socket=socket)
        self._stopped = False  # `stop` was called; no Event, whose lock a handler may have interrupted
        self._session: Callable[[], None] | None = None  # Stops the present session
        self._unprofiled: set[Unprofiled] = set()  # Versions that could not be profiled

    def stop(self) -> None:
        """End at once, by SystemExit, or after the candidate being measured; call this from a signal handler.

        A session that then waits for a service that has gone is left after STOP_SECONDS.
        """
        self._stopped = True
        if self._session is None:
            raise SystemExit(0)
        self._session()
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)

    def run(self) -> None:
        """Run until `stop` is called.

        Raises PermissionDenied where the service does not let this user tune.
        """
        with self._lease:
            while not self._stopped:
                try:
                    worked = self._step()
                except (Unavailable, NotFound) as error:
                    _log.info("waiting for the service: %s", error)
                    worked = False
                if not worked:
                    self._lease.release()
                    if not self._stopped:
                        time.sleep(REST_SECONDS)  # `stop` ends it by SystemExit

    def _step(self) -> bool:
        """Tune one model for a while; False where there is nothing to do or the lease is not granted."""
        with Client(self._socket) as client:
            view = look(client)
            plan = choose(view.wanted, time.time())
            if plan is None:
                client.report("nothing is left to tune", figures_in(view.records))
                return False
            client.report(f"waiting for the lease to tune {plan.name}", figures_in(view.records))
            if not self._wait_for_lease():
                return False
            view = look(client)  # Waiting for the lease may have lasted a while
            if self._profile(client, view):
                view = look(client)
            plan = choose(view.wanted, time.time())
            if plan is not None:
                self._tune(client, view, plan)
            return True

    def _profile(self, client: Client, view: TunerView) -> bool:
        """Profile used models while the lease is held; return whether anything was learnt."""
        learnt = False
        for version in view.unprofiled:
            if version in self._unprofiled or self._stopped or not self._lease.may_run():
                continue
            try:
                client.profile(version.model, runs=1, timeout=PROFILE_SECONDS)
            except (Unavailable, NotFound):
                raise
            except DeadlineExceeded:
                break  # The service ran requests first: profile another time
            except HonedError as error:
                _log.warning("%s is not profiled: %s", version.model, error)
                self._unprofiled.add(version)
            else:
                learnt = True
        return learnt

    def _wait_for_lease(self) -> bool:
        """Wait a while for the lease, in slices, because a signal does not end a wait.

        Return whether it was granted.
        """
        end = time.monotonic() + REST_SECONDS
        while not self._stopped and time.monotonic() < end:
            if self._lease.wait_until_granted(_SLICE_SECONDS):
                return True
        return False

    def _tune(self, client: Client, view: TunerView, plan: PassPlan) -> None:
        known = next(m.history for m in view.wanted if m.name == plan.name)
        from .passes import (
            TuningPass,
        )  # Imported late with TVM, which takes 100 MiB, so that a tuner without models does without

        _log.info("tuning %s for up to %.0f s", plan.name, plan.seconds)
        client.report(f"tuning {plan.name}: preparing")
        try:
            with (
                client.export(plan.name) as given,
                tempfile.TemporaryDirectory(prefix="honed-tune-") as folder,
            ):
                if not given.sources:
                    raise ModelRefused(f"{plan.name} was added compiled, so there is no source to tune")
                one = TuningPass(client, self._lease, view, plan, given, Path(folder))
                self._session = one.stop
                if not self._stopped:
                    known = one.run(known)
        except ModelRefused as error:
            _log.warning("%s is not tuned: %s", plan.name, error)
            known = after_pass(known, finished=True, headroom=0.0, hints=known.hints)
        except (Unavailable, NotFound):
            raise
        except HonedError as error:
            known = after_failure(known, str(error), time.time())
            _log.warning("tuning %s failed, it is tried again later: %s", plan.name, error)
        finally:
            self._session = None
        view.memory.put(plan.name, known)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)
