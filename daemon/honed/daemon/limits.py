"""What the service accepts from others: the [limits] table of its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_MESSAGE_DEPTH = 16
MAX_MESSAGE_VALUES = 65_536
MAX_PENDING_DESCRIPTORS = 64  # received with a message that is not whole yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds with their defaults; sizes in bytes unless the name says MiB, times in seconds.

    max_connections: open connections, all users together.
    max_user_connections: open connections of one user.
    max_unanswered: requests of one connection; it is not read further until one is answered.
    max_message_bytes: one message; larger tensors go through shared memory.
    max_user_bytes: data of one user inside messages that were not answered yet.
    message_seconds: from the first byte of a message to its last.
    write_seconds: without progress while a client does not read its answers.
    max_regions: shared-memory regions of one connection.
    max_queue: inferences that wait.
    run_seconds: one inference on the device; beyond it the worker counts as hung.
    load_seconds: the worker's start, or building the kernels of one model.
    max_models: models in the store.
    max_model_bytes: a model with its external data.
    max_jobs: models being added; they are compiled one after the other.
    compile_seconds: compiling one model.
    compile_memory_mib: memory of the compiler, MiB.
    stop_seconds: finishing what is queued when the service is told to stop.
    """

    max_connections: int = 256
    max_user_connections: int = 128
    max_unanswered: int = 64
    max_message_bytes: int = field(default=64 << 20, metadata={"minimum": 4096})
    max_user_bytes: int = field(default=256 << 20, metadata={"minimum": 4096})
    message_seconds: float = field(default=30.0, metadata={"minimum": 0.1})
    write_seconds: float = field(default=30.0, metadata={"minimum": 0.1})
    max_regions: int = 64
    max_queue: int = 256
    run_seconds: float = field(default=60.0, metadata={"minimum": 0.1})
    load_seconds: float = field(default=300.0, metadata={"minimum": 1})
    max_models: int = 256
    max_model_bytes: int = 2 << 30
    max_jobs: int = 8
    compile_seconds: float = field(default=1800.0, metadata={"minimum": 1})
    compile_memory_mib: int = field(default=6144, metadata={"minimum": 256})
    stop_seconds: float = 20.0
