"""Makes every process of a service report another driver version for its devices.

Named `sitecustomize` in a folder of PYTHONPATH, it is imported when Python starts. The driver is the same: it
shows what honed does if the driver's version differs, not how such a driver computes.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SAID = "; said to be another by benchmarks/hub"


class _Finder(importlib.abc.MetaPathFinder):
    """Changes honed.machine.devices as it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of honed.machine.devices, whose loader also changes the module."""
        if name != "honed.machine.devices":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def changed(module: ModuleType) -> None:
            load(module)
            profile_of = module.profile_of

            def another(device: Any) -> Any:
                profile = profile_of(device)
                version = profile.identity.driver_version + SAID
                identity = dataclasses.replace(profile.identity, driver_version=version)
                return dataclasses.replace(profile, identity=identity)

            module.profile_of = another  # type: ignore[attr-defined]

        loader.exec_module = changed
        return spec


sys.meta_path.insert(0, _Finder())
