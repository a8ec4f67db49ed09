"""What the process that runs parts of models may take. The service passes it on without NumPy."""

from __future__ import annotations

from dataclasses import dataclass

PROVING_MIB = 1024  # where a model is compiled and compared with its reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """Threads of one run (0: as many as are good) and memory in MiB (0: any)."""

    threads: int = 0
    memory_mib: int = 0


UNLIMITED = PartLimits()
