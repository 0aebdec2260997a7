"""What ranks say to each other during a forward pass: sums and gathers, over gloo on the CPU and NCCL on CUDA.

One rank alone needs no process group: `Alone` answers at once. Leaves who computes what to the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class Collectives(Protocol):
    """The ranks of one model copy, as one of them sees the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The elementwise sum over ranks, the same bits on each; may overwrite `x`."""
        ...

    def gather_columns(self, x: Tensor, width: int, total: int) -> Tensor:
        """Every rank's columns side by side: [n, total]. `x` [n, at most `width`]; all but the last are `width`."""
        ...

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank."""

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor, width: int, total: int) -> Tensor:
        return x

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        """Nothing to leave."""


class ProcessGroup:
    """Several ranks over torch.distributed."""

    def __init__(self, rank: int, size: int, rendezvous: str, device: torch.device, timeout: float = 60.0) -> None:
        """Joins the others at `rendezvous`, a torch.distributed init method (tcp://host:port or file:///path)."""
        self._rank, self._size, self._device = rank, size, device
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather_columns(self, x: Tensor, width: int, total: int) -> Tensor:
        padded = functional.pad(x, (0, width - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts, dim=1)[:, :total]

    def least(self, value: int) -> int:
        found = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found.item())

    def close(self) -> None:
        dist.destroy_process_group()


def join(rank: int, size: int, rendezvous: str, device: torch.device) -> Collectives:
    """The collectives of `rank` among `size` ranks; blocks until all have come."""
    return Alone() if size == 1 else ProcessGroup(rank, size, rendezvous, device)
