"""Running compiled functions on torch's own threads.

torch's thread pool on Linux is libgomp's; a parallel region started there from here uses the same threads, so nothing
competes for cores. A region's work is dealt out in chunks, by a counter in its arguments, so that a thread that other
processes disturb holds nobody up.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")


@cache
def missing() -> str:
    """Why compiled kernels can't run here; empty when they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"compiled kernels need Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    flags = re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    lacking = sorted(set(_NEEDED) - set(flags.group(1).split() if flags else ()))
    if lacking:
        return f"this processor has no {', '.join(lacking)}"
    if importlib.util.find_spec("numba") is None:
        return "numba isn't installed"
    return _uncompilable() or ("" if hasattr(_torch(), "GOMP_parallel") else "torch's threads aren't libgomp's")


def _uncompilable() -> str:
    """Why numba doesn't compile here, or not for this processor; empty when it does. Code for a lesser one that holds
    our instructions would end the process."""
    try:
        numba, registry = importlib.import_module("numba"), importlib.import_module("numba.core.registry")
    except ImportError as error:
        return f"numba can't be imported: {error}"
    if numba.config.DISABLE_JIT:
        return "numba is told not to compile (NUMBA_DISABLE_JIT)"
    _, processor, features = registry.cpu_target.target_context.codegen().magic_tuple()
    if any(f"+{name.replace('_', '')}" not in features.split(",") for name in _NEEDED):
        return f"numba is told to compile for another processor ({processor} {features})".replace(" )", ")")
    return ""


def run(function: int, threads: int, arguments: ctypes.Array[ctypes.c_int64]) -> None:
    """Calls the compiled void(void *) at address `function` with `arguments` on `threads` threads at once; returns when
    all are done. A function whose first argument is the counter that they share gets it as zero."""
    _parallel()(function, ctypes.addressof(arguments), threads, 0)


@cache
def _torch() -> ctypes.CDLL:
    """torch's library, through which the functions of the very libgomp that torch uses are found: there may be several
    in a process."""
    return ctypes.CDLL(importlib.import_module("torch._C").__file__)


@cache
def give_way() -> int:
    """Address of the function by which a thread lets others have its core. It takes no argument, and ignores some."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@cache
def _parallel() -> Callable[[int, int, int, int], None]:
    function = _torch().GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
