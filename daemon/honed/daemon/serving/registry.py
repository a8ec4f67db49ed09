"""The models by name. Only the machine enters and removes them; everybody may look."""

from __future__ import annotations

from honed.daemon.compiled import Compiled
from honed.daemon.statistics import Statistics
from honed.daemon.store import Manifest
from honed.protocol.errors import NotFound, Unavailable

from .states import ServedModel, State


class Registry:
    """Every model at the version that is served.

    `whole` counts the requests for all of them, those gone and those unknown too.
    """

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self.whole = Statistics()

    def put(self, model: ServedModel) -> ServedModel | None:
        """Enter a model; gives the one it replaces, whose statistics it goes on with."""
        replaced = self._models.get(model.name)
        model.statistics = replaced.statistics if replaced else Statistics(whole=self.whole)
        self._models[model.name] = model
        return replaced

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

    def find(self, name: str) -> ServedModel | None:
        """The model of that name, or None."""
        return self._models.get(name)

    def serves(self, model: ServedModel) -> bool:
        """Whether it is the version that is served."""
        return self._models.get(model.name) is model

    def numbered(self, number: int) -> ServedModel | None:
        """The version of that number, while it is the one served."""
        return next((model for model in self._models.values() if model.number == number), None)

    def statistics(self, name: str) -> Statistics:
        """Where requests for that name are counted."""
        model = self._models.get(name)
        return model.statistics if model else self.whole

    def compiled(self, name: str) -> tuple[ServedModel, Compiled]:
        """A model whose compiled file is there and readable; raises NotFound or Unavailable."""
        model = self.get(name)
        if model.compiled is None and model.on_cpu:
            why = model.manifest.why or "it is being compiled"
            raise Unavailable(f"model {name!r} has no compiled form: {why}")
        if model.compiled is None:
            raise Unavailable(f"model {name!r} cannot be used: {model.reason}")
        return model, model.compiled

    def all(self) -> list[ServedModel]:
        """Every model, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def of(self, engine: str) -> list[ServedModel]:
        """Every model that an engine serves, by name."""
        return [model for model in self.all() if model.engine == engine]

    def manifests(self) -> list[Manifest]:
        """Of every model, for the store to know what is used."""
        return [model.manifest for model in self.all()]

    def count(self, state: State) -> int:
        """How many models are in a state."""
        return sum(model.state is state for model in self._models.values())
