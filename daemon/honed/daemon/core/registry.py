"""The models by name. Only the machine enters and removes them; everybody may look."""

from __future__ import annotations

from honed.daemon.apps.names import EVERYTHING, Viewer
from honed.daemon.core.statistics import Statistics
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.interface import Interface
from honed.daemon.store.store import Manifest
from honed.daemon.store.variantnames import is_variant, model_of
from honed.protocol.errors import NotFound, Unavailable
from honed.protocol.results import OptimisationCheck
from honed.runtime.engines import HIGHEST

from .states import ServedModel, State


class Registry:
    """Every model at the version that is served.

    `whole` counts the requests for all of them, those gone and those unknown too; `common` the same without
    users' own.
    """

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._resting: dict[str, ServedModel] = {}  # variants
        self.levels: dict[str, str] = {}  # of sources that are loaded anew, by key
        self.whole = Statistics()
        self.common = Statistics(whole=self.whole)

    def put(self, model: ServedModel) -> ServedModel | None:
        """Enter a model; gives the one it replaces, whose statistics it goes on with."""
        replaced = self._models.get(model.name)
        self._count(model, replaced or self._resting.pop(model.name, None))
        self._models[model.name] = model
        return replaced

    def rest(self, model: ServedModel) -> None:
        """Keep a variant, in the place of one of its name that rests, which nothing serves."""
        self._count(model, self._resting.get(model.name))
        self._resting[model.name] = model

    def forget_resting(self, name: str) -> bool:
        """Keep a variant no more; False where none of that name rests."""
        return self._resting.pop(name, None) is not None

    def _count(self, model: ServedModel, before: ServedModel | None) -> None:
        """Have its requests counted; those of a variant are its model's, too."""
        if before is not None:
            model.statistics = before.statistics
        elif model.statistics.whole is None:
            of = self._models.get(model_of(model.name))
            every = self.common if model.manifest.owner is None else self.whole
            model.statistics = Statistics(whole=of.statistics if of is not None else every)

    def pop(self, name: str) -> ServedModel:
        """Take a model out; raises NotFound."""
        model = self.get(name)
        del self._models[name]
        return model

    def get(self, name: str) -> ServedModel:
        """The model of that name; raises NotFound."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name[:80]!r}; 'hone list' shows which there are")
        return model

    def model(self, name: str) -> ServedModel:
        """The same for apps, who know of no variants."""
        if is_variant(name):
            raise NotFound(
                f"{name[:80]!r} is a variant; ask its model, {model_of(name)[:80]!r}, in its shapes"
            )
        return self.get(name)

    def variant(self, name: str) -> ServedModel | None:
        """The variant of that name, though it rest, or None."""
        return (self._resting.get(name) or self._models.get(name)) if is_variant(name) else None

    def entry(self, name: str) -> ServedModel:
        """A model, or a variant, though it rest; raises NotFound."""
        return self.variant(name) or self.get(name)

    def rests(self, model: ServedModel) -> bool:
        """Whether it is a variant that rests."""
        return self._resting.get(model.name) is model

    def find(self, name: str) -> ServedModel | None:
        """The model of that name, or None."""
        return self._models.get(name)

    def serves(self, model: ServedModel) -> bool:
        """Whether it is the version that is served."""
        return self._models.get(model.name) is model

    def keeps(self, model: ServedModel) -> bool:
        """Whether its manifest is that of the version that is served, or of a variant that rests."""
        kept = self._models.get(model.name) or self._resting.get(model.name)
        return kept is not None and kept.manifest is model.manifest

    def numbered(self, number: int) -> ServedModel | None:
        """The version of that number, while it is the one served."""
        return next((model for model in self._models.values() if model.number == number), None)

    def statistics(self, name: str) -> Statistics:
        """Where requests for that name are counted."""
        model = self._models.get(name)
        return model.statistics if model else self.common

    def compiled(self, name: str) -> tuple[ServedModel, Compiled]:
        """A model whose compiled file is there and readable; raises NotFound or Unavailable."""
        model = self.entry(name)
        if model.compiled is None and model.on_cpu:
            why = model.manifest.why or "it is being compiled"
            raise Unavailable(f"model {name!r} has no compiled form: {why}")
        if model.compiled is None:
            raise Unavailable(f"model {name!r} cannot be used: {model.reason}")
        return model, model.compiled

    def interfaces(self, model: ServedModel) -> tuple[Interface | None, Interface | None]:
        """Of a model's compiled form, and of its file where the CPU engine runs that.

        One of them at least; raises Unavailable where there is none.
        """
        compiled, given = model.compiled, model.manifest.interface
        if compiled is None and given is None:
            self.compiled(model.name)  # which says why
        return compiled.interface if compiled is not None else None, given

    def all(self) -> list[ServedModel]:
        """Every model and variant that is served, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def models(self, viewer: Viewer = EVERYTHING) -> list[ServedModel]:
        """Every model that is there for `viewer`, by name, without variants."""
        models = (model for model in self.all() if not is_variant(model.name))
        return [model for model in models if viewer.sees(model.manifest.owner)]

    def variants(self, model: str = "") -> list[ServedModel]:
        """The variants of a model, "": of all, by name; those that rest, too."""
        known = {name: each for name, each in self._models.items() if is_variant(name)} | self._resting
        return [each for name, each in sorted(known.items()) if model in ("", model_of(name))]

    def of(self, engine: str) -> list[ServedModel]:
        """Every model that an engine serves, by name."""
        return [model for model in self.all() if model.engine == engine]

    def manifests(self) -> list[Manifest]:
        """Of every model and variant, for the store to know what is used."""
        return [model.manifest for model in (*self.all(), *self._resting.values())]

    def optimisation(self, source: str) -> OptimisationCheck | None:
        """What was found of the file that the CPU engine calls so; None where nothing was yet."""
        known = (m.optimisation for m in self.manifests() if m.optimisation and m.source_key == source)
        return next(known, None)

    def level(self, source: str) -> str:
        """How far ONNX Runtime may optimise it."""
        found = self.optimisation(source)
        return self.levels.get(source) or (found.level if found is not None else HIGHEST)

    def count(self, state: State, viewer: Viewer = EVERYTHING) -> int:
        """How many models are in a state."""
        return sum(model.state is state for model in self.models(viewer))
