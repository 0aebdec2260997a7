"""What to print beside every figure: the machine, and CPU and memory of the processes under test."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str | int | float]:
    """Processor, cores, memory (GiB), load and interpreter, as one flat record."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*:\s*(.+)", info)
    total = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": name.group(1) if name else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(int(total.group(1)) / 2**20, 1) if total else 0,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the tree: CPU seconds used so far, proportional memory in bytes."""

    pid: int
    name: str
    cpu: float
    pss: int


def _children(pid: int, parents: dict[int, int]) -> set[int]:
    found = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found


def session(marker: str) -> list[Process]:
    """Every process whose environment holds `marker` (FLARE_BENCHMARK=…), children included.

    Ray starts its processes through daemons that leave the parent's tree, so a mark in the environment is the only
    reliable thread back.
    """
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if marker.encode() in (entry / "environ").read_bytes():
                marked.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    pids = set().union(*(_children(pid, parents) for pid in marked)) if marked else set()
    found = [process for pid in sorted(pids) if (process := read(pid)) is not None]
    return [process for process in found if process.pid != os.getpid()]


def read(pid: int) -> Process | None:
    """CPU and memory of one process; None when it is gone."""
    root = Path(f"/proc/{pid}")
    try:
        stat = (root / "stat").read_text().rsplit(")", 1)[1].split()
        command = (root / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        rollup = (root / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    pss = re.search(r"^Pss:\s*(\d+)", rollup, re.MULTILINE)
    name = command or (root / "comm").read_text().strip()
    return Process(pid, name[:80], (int(stat[11]) + int(stat[12])) / TICK, int(pss.group(1)) * 1024 if pss else 0)
