"""Where compiled kernels can't run, and why; what was kept of them is taken, or made anew where it is damaged."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.kernels import team

if team.missing():
    pytest.skip(team.missing(), allow_module_level=True)

import numba
from numba import carray, types

from engine.kernels import memory
from engine.kernels.program import KERNEL, run


def double(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, numbers, their address."""
    numbers = carray(memory.pointer(carray(raw, (3,), np.int64)[2]), (last,), np.int64)
    for index in range(first, last):
        numbers[index] *= 2


def works(kernel: Any) -> bool:
    numbers = np.arange(40)
    run((kernel.address, (3, 40, numbers.ctypes.data)), 2)
    return bool((numbers == 2 * np.arange(40)).all())


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(memory, "_CACHED", True)
    return tmp_path


def test_a_kept_kernel_is_taken(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert works(memory.compiled(KERNEL)(double))
    again = memory.compiled(KERNEL)(double)
    assert again.cache_hits == 1
    assert works(again)
    assert not caplog.records


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_one_is_made_anew(kept: Path, ending: str, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    memory.compiled(KERNEL)(double)
    (damaged,) = kept.rglob(f"*double*.{ending}")
    damaged.write_bytes(content)
    assert works(memory.compiled(KERNEL)(double))
    assert "test_team.double is compiled" in caplog.text
    assert not list(kept.rglob("*double*"))
    memory.compiled(KERNEL)(double)
    assert memory.compiled(KERNEL)(double).cache_hits == 1


def test_what_cannot_be_compiled_is_still_said(kept: Path) -> None:
    def wrong(raw: Any, first: Any, last: Any) -> None:
        raw.nonsense()

    with pytest.raises(numba.core.errors.TypingError, match="nonsense"):
        memory.compiled(types.void(types.voidptr, types.int64, types.int64))(wrong)


def missing() -> str:
    return team.missing.__wrapped__()


def test_why_numba_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == ""
    with monkeypatch.context() as patch:
        patch.setattr(numba.config, "DISABLE_JIT", 1)
        assert missing() == "numba is told not to compile (NUMBA_DISABLE_JIT)"
    with monkeypatch.context() as patch:
        codegen = type(numba.core.registry.cpu_target.target_context.codegen())
        patch.setattr(codegen, "magic_tuple", lambda self: ("x86_64-unknown-linux-gnu", "generic", ""))
        assert missing() == "numba is told to compile for another processor (generic)"

    def broken(name: str) -> ModuleType:
        if name == "numba":
            raise ImportError("Numba needs another NumPy")
        return importlib.__import__(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert missing() == "numba can't be imported: Numba needs another NumPy"
