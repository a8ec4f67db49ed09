"""The methods of the service: a row each with parameters, result, permission, and use of descriptors.

The service answers no other methods, and both clients use these rows.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, get_args, get_type_hints

from . import strict
from .errors import Internal, InvalidArgument, NotFound
from .strict import Map

if TYPE_CHECKING:
    from . import params, results, service, values

P = TypeVar("P")
R = TypeVar("R")

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION: Final = "1"  # The one version of every model
DEFAULT_TIMEOUT_US: Final = 60_000_000
MAX_TIMEOUT_US: Final = 24 * 3600 * 1_000_000
EXTENSIONS: Final = ("model_repository", "statistics", "system_shared_memory", "honed")


class Permission(enum.Enum):
    """The groups of callers that may use a method."""

    ANYONE = enum.auto()
    INFER = enum.auto()
    OWN = enum.auto()  # INFER for the caller's own uploads, CHANGE for administrators' models
    HINTS = enum.auto()  # Sharing records between machines; those of others are only hints here
    CHANGE = enum.auto()


@dataclass(frozen=True, slots=True)
class Method(Generic[P, R]):
    """A method of the service; `returns_descriptors`: its answer may have descriptors."""

    name: str
    right: Permission
    returns_descriptors: bool

    @property
    def params(self) -> type[P]:
        """The dataclass of its parameters."""
        return cast("type[P]", _types()[self.name][0])

    @property
    def result(self) -> type[R]:
        """The dataclass of its result."""
        return cast("type[R]", _types()[self.name][1])

    def result_of(self, plain: Map) -> R:
        """Return the result from the received map, which may have fields of later services.

        Raises Internal if the map is invalid.
        """
        try:
            return strict.from_plain(self.result, plain, where=self.name, unknown_ignored=True)
        except strict.SchemaError as error:
            raise Internal(f"the service's answer makes no sense ({error}); compare versions") from error


METHODS: Final[dict[str, Method[Any, Any]]] = {}


def _row(name: str, right: Permission, *, gives: bool = False) -> Method[Any, Any]:
    row = METHODS[name] = Method(name, right, gives)
    return row


SERVER_LIVE: Method[params.Nothing, results.Live] = _row("ServerLive", Permission.ANYONE)
SERVER_READY: Method[params.Nothing, results.Ready] = _row("ServerReady", Permission.ANYONE)
SERVER_METADATA: Method[params.Nothing, results.ServerMetadata] = _row("ServerMetadata", Permission.ANYONE)
SERVER_STATUS: Method[params.Nothing, service.Status] = _row("ServerStatus", Permission.INFER)
METRICS: Method[params.MetricsParams, service.Metrics] = _row("Metrics", Permission.INFER)
CONFIG_SHOW: Method[params.Nothing, service.ConfigShown] = _row("ConfigShow", Permission.INFER)
CONFIG_RELOAD: Method[params.Nothing, service.ConfigReloaded] = _row("ConfigReload", Permission.CHANGE)
MODEL_READY: Method[params.ModelParams, results.Ready] = _row("ModelReady", Permission.INFER)
MODEL_METADATA: Method[params.ModelParams, results.ModelMetadata] = _row("ModelMetadata", Permission.INFER)
MODEL_STATISTICS: Method[params.ModelParams, results.ModelStatistics] = _row(
    "ModelStatistics", Permission.INFER
)
MODEL_SHOW: Method[params.ModelParams, results.ModelShown] = _row("ModelShow", Permission.INFER)
MODEL_PROFILE: Method[params.ProfileParams, values.ModelProfile] = _row("ModelProfile", Permission.INFER)
MODEL_EXPORT: Method[params.ExportParams, results.ModelExported] = _row(
    "ModelExport", Permission.CHANGE, gives=True
)
MODEL_FORM: Method[params.FormParams, results.ModelForm] = _row("ModelForm", Permission.OWN)
MODEL_PUBLISH: Method[params.PublishParams, results.ModelPublished] = _row("ModelPublish", Permission.CHANGE)
MODEL_HISTORY: Method[params.HistoryParams, results.ModelHistory] = _row("ModelHistory", Permission.INFER)
MODEL_ROLLBACK: Method[params.RollbackParams, results.RolledBack] = _row("ModelRollback", Permission.CHANGE)
MODEL_PIN: Method[params.PinParams, results.VersionPinned] = _row("ModelPin", Permission.CHANGE)
MODEL_SET: Method[params.SetParams, results.ModelSettings] = _row("ModelSet", Permission.CHANGE)
MODEL_INFER: Method[params.InferParams, results.InferResult] = _row("ModelInfer", Permission.INFER)
MODEL_PREPARE: Method[params.PrepareParams, results.PrepareResult] = _row("ModelPrepare", Permission.INFER)
MODEL_RUN: Method[params.RunParams, results.InferResult] = _row("ModelRun", Permission.INFER)
LEASE_ASK: Method[params.LeaseAskParams, service.LeaseAsked] = _row("LeaseAsk", Permission.CHANGE)
LEASE_RELEASE: Method[params.LeaseReleaseParams, values.Empty] = _row("LeaseRelease", Permission.CHANGE)
TUNER_REPORT: Method[params.TunerReportParams, values.Empty] = _row("TunerReport", Permission.CHANGE)
TUNER_RUN: Method[params.TunerRunParams, service.TunerRan] = _row("TunerRun", Permission.CHANGE, gives=True)
TUNER_STOP: Method[params.TunerStopParams, values.Empty] = _row("TunerStop", Permission.CHANGE)
HINTS_EXPORT: Method[params.HintsExportParams, service.HintsExported] = _row(
    "HintsExport", Permission.HINTS, gives=True
)
HINTS_IMPORT: Method[params.HintsImportParams, service.HintsImported] = _row("HintsImport", Permission.HINTS)
SHARED_MEMORY_REGISTER: Method[params.RegionParams, values.Empty] = _row(
    "SystemSharedMemoryRegister", Permission.INFER
)
SHARED_MEMORY_STATUS: Method[params.RegionName, results.Regions] = _row(
    "SystemSharedMemoryStatus", Permission.INFER
)
SHARED_MEMORY_UNREGISTER: Method[params.RegionName, values.Empty] = _row(
    "SystemSharedMemoryUnregister", Permission.INFER
)
REPOSITORY_INDEX: Method[params.Nothing, results.ModelIndex] = _row("RepositoryIndex", Permission.INFER)
REPOSITORY_MODEL_LOAD: Method[params.LoadParams, results.ModelAdded] = _row(
    "RepositoryModelLoad", Permission.CHANGE
)
REPOSITORY_MODEL_UNLOAD: Method[params.UnloadParams, values.Empty] = _row(
    "RepositoryModelUnload", Permission.OWN
)
MODEL_BRING: Method[params.UploadParams, results.UploadResult] = _row("ModelBring", Permission.INFER)


@functools.cache
def _types() -> dict[str, tuple[type[Any], type[Any]]]:
    """Return the dataclasses of each method's parameters and result, by its annotation.

    They are imported at first use: an app's inferences need none, and creating the classes takes time.
    """
    from . import params, results, service, values

    rows = {name: row for name, row in globals().items() if isinstance(row, Method)}
    noted = SimpleNamespace(__annotations__={name: __annotations__[name] for name in rows})
    hints = get_type_hints(
        noted, globals(), {"params": params, "results": results, "service": service, "values": values}
    )
    return {row.name: get_args(hints[name]) for name, row in rows.items()}


def check_name(name: str, what: str = "model") -> str:
    """Return `name` if it may name a model or region; raise InvalidArgument if not."""
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:80]!r} cannot name a {what}; use 1 to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    return name


def check_version(version: str | None) -> None:
    """Raise NotFound for versions that no model has."""
    if version not in (None, "", VERSION):
        raise NotFound(f"models have the one version {VERSION!r} and not {version[:80]!r}; leave it out")
