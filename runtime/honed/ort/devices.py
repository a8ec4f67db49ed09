"""Where tensors are, as apps say it to ONNX Runtime: with honed always on the host."""

from __future__ import annotations

from . import errors
from .errors import said
from .options import Named

ON_HOST = ("cpu", "honed")


class OrtAllocatorType(Named):
    """How memory is taken; the service's to say."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(Named):
    """Whose memory it is."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtDevice:
    """The host. Numbers are those of ONNX Runtime."""

    def __init__(self, device_type: int = 0, memory_type: int = 0, device_id: int = 0) -> None:
        if device_type:
            raise said(
                errors.NotImplemented, "an app's tensors are on the host in honed; give OrtDevice.cpu()"
            )
        self._memory_type, self._device_id = memory_type, device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """A device by its name; raises NotImplemented for another than "cpu"."""
        check_on_host(ort_device_name)
        return OrtDevice(0, 0, device_id)

    @staticmethod
    def cpu() -> int:
        """The number of the host."""
        return 0

    @staticmethod
    def default_memory() -> int:
        """The number of ordinary memory."""
        return 0

    def device_type(self) -> int:
        """The number of its kind."""
        return 0

    def device_id(self) -> int:
        """Which of its kind."""
        return self._device_id

    def device_vendor_id(self) -> int:
        """The host has none."""
        return 0

    def device_mem_type(self) -> int:
        """The number of its kind of memory."""
        return self._memory_type


class OrtMemoryInfo:
    """Memory by its name; all of it is the host's."""

    def __init__(
        self, name: str, allocator_type: OrtAllocatorType, device_id: int, memory_type: OrtMemType
    ) -> None:
        self.name, self.allocator_type = name, allocator_type
        self.device_id, self.mem_type = device_id, memory_type


class OrtArenaCfg:
    """How an arena grows; the service's to say."""

    def __init__(self, *numbers: object, **by_name: object) -> None:
        """Any of ONNX Runtime's forms."""


def check_on_host(device_type: str) -> None:
    """Raise NotImplemented for tensors elsewhere."""
    if device_type.lower() not in ON_HOST:
        text = f"an app's tensors are on the host in honed; give 'cpu' in place of {device_type!r}"
        raise said(errors.NotImplemented, text)
