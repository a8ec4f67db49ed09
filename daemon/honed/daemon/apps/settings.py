"""The bounds on models that apps bring."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.settings.sections import setting

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AppsSettings:
    """The [apps] table: whether members of the group honed may bring models of their own, and how many.

    enabled: false: none are taken; those there are stay.
    max_users: users who have models of their own at the same time.
    max_models: models of one user.
    disk_mib: what the files of one user's models may take, MiB.
    memory_mib: what the CPU engine of one user, and the process that tries models out for it, may each write,
        MiB; and what one user's models that are kept may take of memory, by the size of their files.
    compile_seconds: compiling one user's models within a day.
    """

    enabled: bool = setting(True)
    max_users: int = setting(16)
    max_models: int = setting(64)
    disk_mib: int = setting(4096, unit="MiB")
    memory_mib: int = setting(2048, unit="MiB", minimum=256, effect="restart")
    compile_seconds: float = setting(1800.0, unit="s", minimum=0)

    @property
    def disk_bytes(self) -> int:
        """disk_mib in bytes."""
        return self.disk_mib * _MIB

    @property
    def all_mib(self) -> int:
        """Memory of all users' processes, MiB: for each an engine, and one that tries models out."""
        return 2 * self.max_users * self.memory_mib

    @property
    def memory_bytes(self) -> int:
        """memory_mib in bytes."""
        return self.memory_mib * _MIB
