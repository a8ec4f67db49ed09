"""ModelInfer from request to answer: sequences, batches, variants, and what is counted of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from honed.daemon.apps.names import is_own
from honed.daemon.changes.sizekeeper import SizeKeeper
from honed.daemon.changes.variantkeeper import VariantKeeper
from honed.daemon.core.model import ServedModel, kind_of
from honed.daemon.core.queue import Replaced, service_stops
from honed.daemon.core.state import Registry
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.counting import counted
from honed.daemon.observe.ledger import Ledger
from honed.daemon.serving import inference
from honed.daemon.serving.pool import Pool
from honed.daemon.serving.sequences import SequenceKey
from honed.daemon.serving.sequencing import Sequencer, key_of
from honed.daemon.settings.limits import Limits
from honed.daemon.transport.connection import Connection
from honed.daemon.worker.regions import RegionLookup
from honed.protocol.methods import check_version
from honed.protocol.params import InferParams
from honed.protocol.results import Inferred

from .batcher import Batcher, joinable
from .bringer import Bringer


@dataclass(kw_only=True)
class Inferring:
    """Answers inferences, until the service is `stopping`."""

    limits: Limits
    registry: Registry
    pool: Pool
    bringer: Bringer
    sequencer: Sequencer
    batcher: Batcher
    variants: VariantKeeper
    sizes: SizeKeeper
    leasing: Leasing
    ledger: Ledger
    stopping: bool = False

    def check_running(self) -> None:
        """Raise Unavailable while the service stops."""
        if self.stopping:
            raise service_stops()

    async def infer(self, connection: Connection, params: InferParams) -> Inferred:
        """The result of ModelInfer; raises what went wrong."""
        regions, user = connection.regions, connection.peer.uid
        if is_own(params.model_name) and self.registry.find(params.model_name) is not None:
            self.bringer.used(params.model_name)
        with counted(self.registry.statistics(params.model_name)):
            check_version(params.model_version)
            key = key_of(user, params)
            if key is None:
                entry = self.registry.model(params.model_name)
                return await self._answered(connection, entry, params, regions, alone=False)
            async with self.sequencer.turn(key, params) as timed:
                self.check_running()
                return await self._in_sequence(connection, key, timed)

    async def _in_sequence(self, connection: Connection, key: SequenceKey, params: InferParams) -> Inferred:
        entry = self.registry.model(params.model_name)
        ends = params.parameters is not None and params.parameters.sequence_end
        if ends and not params.inputs:
            self.sequencer.end(key, entry)
            return inference.nothing(params, kind_of(entry.engine))
        compiled, given = self.registry.interfaces(entry)
        interface = compiled or given
        assert interface is not None
        woven = self.sequencer.woven(key, entry, interface, params)
        regions = connection.regions
        try:
            return self.sequencer.taken(woven, await self._answered(connection, entry, woven.params, regions))
        except BaseException:
            self.sequencer.failed(woven)
            raise

    async def _answered(
        self,
        connection: Connection,
        entry: ServedModel,
        params: InferParams,
        regions: RegionLookup,
        *,
        alone: bool = True,
    ) -> Inferred:
        """Unless it is to run `alone`, it may be run as one with others of the model.

        Where its model was replaced while it waited, it is checked anew for the one that took its place; but
        for one in a sequence, whose state is of the model before.
        """
        deadline = time.monotonic() + inference.timeout_us(params.parameters) / 1e6
        while True:
            try:
                return await self._answered_by(connection, entry, params, regions, deadline, alone=alone)
            except Replaced:
                if alone:
                    raise
                entry = self.registry.model(entry.name)

    async def _answered_by(
        self,
        connection: Connection,
        entry: ServedModel,
        params: InferParams,
        regions: RegionLookup,
        deadline: float,
        *,
        alone: bool,
    ) -> Inferred:
        runner = self.variants.runner(entry, params)
        compiled, given = self.registry.interfaces(runner)
        with self.leasing.serving(entry.name, connection.peer.pid):
            plan = inference.check(
                params,
                compiled,
                given,
                regions,
                max_bytes=self.limits.max_answer_bytes,
                keep=self.ledger.settings.keep_inputs,
            )
            plan = replace(plan, timeout=deadline - time.monotonic())
            if not alone and joinable(plan, entry.manifest.settings):
                result = await self.batcher.infer(connection.client, entry, plan)
                self.variants.served(entry, plan)
                return result
            result, met = await self.pool.asking.infer(connection.client, runner, plan)
        self.variants.served(entry, plan)
        self.sizes.met(runner, met)
        unfit = plan.open and runner.compiled is not None  # for what could be tuned
        if self.registry.find(runner.name) is not None and not runner.away and not unfit:
            self.ledger.ran(runner.name, result.parameters.compute_us / 1e6)
        return result
