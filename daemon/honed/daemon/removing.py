"""Removes a model, with everything that is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass

from .jobs import Jobs
from .leasing import Leasing
from .ledger import Ledger
from .sequencing import Sequencer
from .serving.registry import Registry
from .variants.keeper import VariantKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Remover:
    """The parts of a service that remember something of models."""

    registry: Registry
    jobs: Jobs
    variants: VariantKeeper
    ledger: Ledger
    sequencer: Sequencer
    leasing: Leasing

    async def remove(self, name: str) -> None:
        """Stop serving a model and delete its files; raises NotFound."""
        name = self.registry.model(name).name
        variants = [each.name for each in self.registry.variants(name)]
        await self.jobs.remove(name)
        self.variants.forget(variants)
        self.ledger.forget(name)
        self.sequencer.sequences.forget_model(name)
        self.leasing.forget(name)
