"""The device seam: where tensors live, how inputs reach them and how results come back.

Hides streams, events and pinned memory, so that nothing else asks which device it runs on. On the CPU every call is
immediate; on CUDA uploads and readbacks are asynchronous, readbacks on a stream of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

_CPU_KV_BYTES = 1 << 30
_CUDA_MEMORY_SHARE = 0.9
_CUDA_WORKSPACE = 3 << 30
"""Left for activations, logits and libraries beside weights and pages."""


class DeviceUnavailable(RuntimeError):
    """The configured device isn't there. The message says which and why."""


class Readback(Protocol):
    """Tensors on their way to the host."""

    def ready(self) -> bool: ...

    def wait(self) -> list[Tensor]:
        """The tensors on the host; blocks until they are there."""
        ...


class Device(Protocol):
    """Where a rank computes."""

    asynchronous: bool
    """Whether launched work runs beside the host."""
    cache_bytes: int
    """The last-level cache; 0 where unknown or meaningless."""

    @property
    def torch(self) -> torch.device: ...

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy of `array` on the device, ordered before what is launched next."""
        ...

    def readback(self, tensors: Sequence[Tensor]) -> Readback:
        """Starts copying `tensors`, as they are after what has been launched so far, to the host."""
        ...

    def kv_bytes(self) -> int:
        """The default size of the KV pool, once the weights are loaded."""
        ...

    def undivided(self) -> AbstractContextManager[None]:
        """For many short passes, which cost more to share among threads than to do."""
        ...


class _Immediate:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def ready(self) -> bool:
        return True

    def wait(self) -> list[Tensor]:
        return self._tensors


class CpuDevice:
    """The host itself. One thread pool, sized here, once."""

    asynchronous = False

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._threads = threads
        self.torch = torch.device("cpu")
        self.cache_bytes = last_level_cache()

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def readback(self, tensors: Sequence[Tensor]) -> Readback:
        return _Immediate(tensors)

    def kv_bytes(self) -> int:
        return _CPU_KV_BYTES

    @contextmanager
    def undivided(self) -> Iterator[None]:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)


class _Pending:
    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in tensors]
            for host, part in zip(self._host, tensors, strict=True):
                host.copy_(part, non_blocking=True)
                part.record_stream(stream)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)

    def ready(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        self._done.synchronize()
        return self._host


class CudaDevice:
    """One CUDA device; `index` counts the visible ones."""

    asynchronous = True
    cache_bytes = 0

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable("device 'cuda' was asked for, but torch sees no CUDA device")
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(f"no CUDA device {index}: {torch.cuda.device_count()} are visible")
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._copies = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.torch, non_blocking=True)

    def readback(self, tensors: Sequence[Tensor]) -> Readback:
        return _Pending(tensors, self._copies)

    def kv_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch)
        return max(int(free - total * (1 - _CUDA_MEMORY_SHARE)) - _CUDA_WORKSPACE, 0)

    def undivided(self) -> AbstractContextManager[None]:
        return nullcontext()


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache() -> int:
    """Bytes of the first processor's largest cache, a property of its type; 0 where the system doesn't tell."""
    sizes = [0]
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM") or 0) * unit)
    return max(sizes)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_device(kind: str, rank: int, size: int, threads: int | None) -> Device:
    """The device of `rank` among `size`: `kind` auto, cpu or cuda. Raises DeviceUnavailable.

    A rank that sees one CUDA device (its actor's own) takes that, else the one of its number. Without `threads`, ranks
    on the CPU divide the cores."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return CudaDevice(rank if torch.cuda.device_count() > 1 else 0)
    return CpuDevice(threads or max(1, cores() // size))
