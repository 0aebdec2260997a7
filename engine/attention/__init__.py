"""Attention backends behind one seam; `choose` picks one and says so, and never falls back from an explicit choice."""

from __future__ import annotations

from engine.attention.compiled import CompiledAttention
from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention
from engine.attention.protocol import AttentionBackend, AttentionUnavailable, KvPool, Needs
from engine.attention.reference import ReferenceAttention

__all__ = ["choose"]


def choose(name: str, needs: Needs, pool: KvPool) -> AttentionBackend:
    """The backend called `name`, or for "auto" the best one that serves `needs`. Raises AttentionUnavailable."""
    if name == "auto" and needs.device == "cpu":
        name = "cpu" if CompiledAttention.missing(needs) else "compiled"
    elif name == "auto":
        name = "reference" if FlashAttention.missing(needs) else "flash"
    if name == "reference":
        refuse(name, ReferenceAttention.capabilities.missing(needs))
        return ReferenceAttention(pool)
    if name == "cpu":
        refuse(name, CpuAttention.capabilities.missing(needs))
        return CpuAttention(pool, needs)
    if name == "compiled":
        refuse(name, CompiledAttention.missing(needs))
        return CompiledAttention(pool, needs)
    if name == "flash":
        refuse(name, FlashAttention.missing(needs))
        return FlashAttention(pool, needs)
    raise AttentionUnavailable(f"attention {name!r} isn't built yet; choose reference, cpu, compiled or flash")


def refuse(name: str, missing: list[str]) -> None:
    if missing:
        raise AttentionUnavailable(f"attention {name!r} can't serve this model; missing: {', '.join(missing)}")
