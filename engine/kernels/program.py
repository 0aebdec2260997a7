"""Many compiled calls as one parallel region: every thread makes every call, a barrier after each.

Between two calls no thread returns to Python or sleeps, which for a step of a small model is most of its time. What
differs from run to run, sizes and addresses, is named when a call is added and given when the program runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from engine.kernels import team
from engine.kernels.memory import CACHED, address, pointer

MOST_ARGUMENTS = 18

Call = tuple[int, Sequence[int | str]]
"""A compiled function's address and its arguments; a name stands for what each run gives."""


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, function: Any, argument: Any) -> Any:
    """Calls the void(void *) at address `function`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [builder.inttoptr(arguments[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@cfunc(types.void(types.voidptr), cache=CACHED)  # type: ignore[untyped-decorator]
def _replay(raw: Any) -> None:
    """Arguments: calls, address of their table, function that is the barrier."""
    a = carray(raw, (3,), np.int64)
    size = 8 * (MOST_ARGUMENTS + 1)
    for index in range(a[0]):
        place = a[1] + index * size
        _call(carray(pointer(place), (1,), np.int64)[0], place + 8)
        _call(a[2], address(raw))


class Program:
    """`calls` in order. Their first argument, the counter, is set to zero before each run."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._table = np.zeros((len(calls), 1 + MOST_ARGUMENTS), dtype=np.int64)
        named: dict[str, list[int]] = {}
        flat = self._table.reshape(-1)
        for index, (function, arguments) in enumerate(calls):
            for place, value in enumerate((function, *arguments), index * self._table.shape[1]):
                if isinstance(value, str):
                    named.setdefault(value, []).append(place)
                else:
                    flat[place] = value
        self._flat = flat
        self._named = {name: np.array(places) for name, places in named.items()}
        self._block = (ctypes.c_int64 * 3)(len(calls), self._table.ctypes.data, team.barrier())

    def run(self, values: Mapping[str, int]) -> None:
        """Raises KeyError when a name has no value."""
        self._table[:, 1] = 0
        for name, places in self._named.items():
            self._flat[places] = values[name]
        team.run(_replay.address, torch.get_num_threads(), self._block)

    def without(self, functions: Collection[int]) -> Program:
        """The same program less the calls of compiled `functions`, by address: what they cost is what it is faster."""
        return Program([call for call in self._calls if call[0] not in functions])
