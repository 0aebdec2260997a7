"""What compiled functions need beside arithmetic: addresses and bits as numbers, and a counter that threads share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

CACHED = any(os.access(place, os.W_OK) for place in (Path(__file__).parent, os.path.expanduser("~")))
"""Whether compiled functions can be kept: beside the sources, else in the user's cache. numba fails without either."""

ROUND = np.float32(1.5 * 2**23)
"""A float32 so great that adding it leaves no room for a fraction; subtracting it again has rounded, as vector code."""

_I64 = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def address(typing: Any, pointer: Any) -> Any:
    """The int64 of a void pointer."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], _I64)

    return types.int64(types.voidptr), emit


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """The void pointer of an int64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, counter: Any, count: Any) -> Any:
    """Adds `count` to the int64 at address `counter`, atomically; what it was before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 that int32 `bits` are."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit
