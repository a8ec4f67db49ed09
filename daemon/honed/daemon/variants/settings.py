"""The bounds on variants."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.settings.schema import setting

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSettings:
    """The [variants] table.

    requests: after so many requests in the same shapes, which count less with time as [usage] says, a model
    gets a variant for these when the machine is idle.
    per_model: variants that are kept of a model, those asked for by hand among them; 0: none is made in idle
    time.
    disk_mib: what the files of all variants may take, MiB.
    sizes: sizes that a part whose sizes depend on the data is compiled for when the machine is idle, once it
    was met in some `requests` times; 0: none.
    memory_mib: what the variants that are loaded may take of their devices, MiB.
    """

    requests: float = setting(20.0, minimum=1)
    per_model: int = setting(16, minimum=0)
    sizes: int = setting(4, minimum=0)
    disk_mib: int = setting(4096, unit="MiB", minimum=0)
    memory_mib: int = setting(1024, unit="MiB", minimum=0)

    @property
    def disk_bytes(self) -> int:
        """disk_mib in bytes."""
        return self.disk_mib * _MIB

    @property
    def memory_bytes(self) -> int:
        """memory_mib in bytes."""
        return self.memory_mib * _MIB
