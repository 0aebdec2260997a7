"""Many compiled calls as one parallel region, each divided among the threads and complete before the next begins.

Between two calls no thread returns to Python or sleeps, which for a step of a small model is most of its time. No
thread waits for another either, unless that one still holds a part of the call: a call's units are dealt out in chunks,
and a thread that other processes keep from its core has none. What differs from run to run, sizes and addresses, is
named when a call is made and given when the program runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels import team
from engine.kernels.memory import compiled, pointer, take, tell, told

KERNEL = types.void(types.voidptr, types.int64, types.int64)
"""A kernel: its arguments' address, and the first and one past the last of its units to work on."""

MOST_ARGUMENTS = 18
_WORDS = MOST_ARGUMENTS + 1
_STATE = 16
"""Words of a call's two counters, a cache line apart: units dealt out and units done."""
_PATIENCE = 2000
"""Looks at a counter before a thread gives its core to others, among whom may be the one that it waits for."""

Call = tuple[int, Sequence[int | str]]
"""A kernel's address and its arguments, of which the first two are how many units a chunk has and how many there are. A
name stands for what each run gives."""


@intrinsic  # type: ignore[untyped-decorator]
def _invoke(typing: Any, function: Any, argument: Any, first: Any, last: Any) -> Any:
    """Calls the kernel at address `function`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], byte), *arguments[2:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typing: Any) -> Any:
    """A moment's rest for what shares the core."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), emit


@compiled(types.void(types.voidptr))
def _replay(raw: Any) -> None:
    """Arguments: calls, address of their table, of their counters, of the function that gives the core away."""
    a = carray(raw, (4,), np.int64)
    for index in range(a[0]):
        place, counters = a[1] + index * 8 * _WORDS, a[2] + index * 8 * _STATE
        call = carray(pointer(place), (3,), np.int64)
        function, chunk, units = call[0], call[1], call[2]
        while True:
            first = take(counters, chunk)
            if first >= units:
                break
            last = min(first + chunk, units)
            _invoke(function, place + 8, first, last)
            tell(counters + 4 * _STATE, last - first)
        looks = 0
        while told(counters + 4 * _STATE) < units:
            _pause()
            looks += 1
            if looks == _PATIENCE:
                _invoke(a[3], 0, 0, 0)
                looks = 0


class Program:
    """`calls` in order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._table = np.zeros((len(calls), _WORDS), dtype=np.int64)
        self._counters = np.zeros((len(calls), _STATE), dtype=np.int64)
        self._flat = self._table.reshape(-1)
        named: dict[str, list[int]] = {}
        for index, (function, arguments) in enumerate(calls):
            for place, value in enumerate((function, *arguments), index * _WORDS):
                if isinstance(value, str):
                    named.setdefault(value, []).append(place)
                else:
                    self._flat[place] = value
        self._named = {name: np.array(places) for name, places in named.items()}
        numbers = len(calls), self._table.ctypes.data, self._counters.ctypes.data, team.give_way()
        self._block = (ctypes.c_int64 * 4)(*numbers)

    def run(self, values: Mapping[str, int]) -> None:
        """Raises KeyError when a name has no value."""
        self._counters.fill(0)
        for name, places in self._named.items():
            self._flat[places] = values[name]
        team.run(_replay.address, torch.get_num_threads(), self._block)

    def without(self, functions: Collection[int]) -> Program:
        """The same program less the calls of compiled `functions`, by address: what they cost is what it is faster."""
        return Program([call for call in self._calls if call[0] not in functions])


def run(call: Call, threads: int) -> None:
    """One call by itself, which must name nothing."""
    function, arguments = call
    table = (ctypes.c_int64 * _WORDS)(function, *map(int, arguments))
    counters = (ctypes.c_int64 * _STATE)()
    numbers = 1, ctypes.addressof(table), ctypes.addressof(counters), team.give_way()
    team.run(_replay.address, threads, (ctypes.c_int64 * 4)(*numbers))
