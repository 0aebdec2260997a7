"""What compiled functions need beside arithmetic: addresses and bits as numbers, a counter that threads share.

Also keeps them from one process to the next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, config, types
from numba.extending import intrinsic

from engine.kernels.emitter import ROUNDING

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def _keep() -> bool:
    """Has numba keep what it compiles where the user says (NUMBA_CACHE_DIR), else beside the sources, else in the
    user's cache; False where none can be written. The place is named by all sources of this folder: numba itself looks
    at the changes of one file alone."""
    digest = sha256()
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.read_bytes())
    usual = _HERE / "__pycache__", Path(os.path.expanduser("~"), ".cache", "flare")
    for place in (Path(config.CACHE_DIR),) if config.CACHE_DIR else usual:
        folder = place / f"kernels-{digest.hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            config.CACHE_DIR = str(folder)
            return True
    return False


_CACHED = _keep()


def compiled(signature: Any, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """`numba.cfunc` that keeps its result, or takes what was kept. Where that is damaged or the disk is full, it
    compiles for this process alone and removes what was kept, so that the next one keeps it anew."""

    def compile(function: Callable[..., None]) -> Any:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        try:
            return cfunc(signature, cache=_CACHED, **options)(function)
        except Exception as error:
            # A damaged file may raise anything; what is wrong with the function itself will do so again below.
            if not _CACHED:
                raise
            log.warning("%s is compiled, since it can't be kept or read: %s: %s", name, type(error).__name__, error)
        for path in Path(config.CACHE_DIR).rglob(f"{name}-*.nb?"):
            path.unlink(missing_ok=True)
        return cfunc(signature, **options)(function)

    return compile


ROUND = np.float32(ROUNDING)
"""Added and subtracted again it has rounded, as vector code."""

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
def tell(typing: Any, counter: Any, count: Any) -> Any:
    """Adds `count` to the int64 at address `counter`, visible to other threads after all that was written before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("add", builder.inttoptr(arguments[0], _I64.as_pointer()), arguments[1], "release")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def told(typing: Any, counter: Any) -> Any:
    """The int64 at address `counter`; what was written before it was told is visible after."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 that int32 `bits` are."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit
