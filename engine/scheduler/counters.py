"""Totals and gauges of one scheduler, as `/metrics` and health need them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start; a new group of ranks doesn't reset them.

    `prefill_tokens`: tokens consumed by completed prefill, recomputation included, padding and reuse excluded.
    `generated_tokens`: committed tokens, EOS and those after a text stop included. `verification_rounds`: decode rows
    that made progress. `verify_steps`: steps with such rows. `reused_tokens`: tokens covered by prefix hits.
    `preemptions`: requests that gave up their pages to an older one. `dropped_rows`: rows whose request had ended
    when their result came.
    """

    prefill_tokens: int = 0
    generated_tokens: int = 0
    verification_rounds: int = 0
    verification_drafts: int = 0
    verify_steps: int = 0
    reused_tokens: int = 0
    reasoning_budget_cuts: int = 0
    preemptions: int = 0
    dropped_rows: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: the totals of Counters, and gauges. `free_pages`: reusable now that completed steps are fenced off,
    without content. `cached_pages`: with published content. `step_age`: seconds since the last committed step while
    steps are in flight, else 0."""

    prefill_tokens: int
    generated_tokens: int
    verification_rounds: int
    verification_drafts: int
    verify_steps: int
    reused_tokens: int
    reasoning_budget_cuts: int
    preemptions: int
    dropped_rows: int
    steps: int
    rebuilds: int
    active: int
    pending: int
    cached_pages: int
    free_pages: int
    total_pages: int
    page_tokens: int
    decode_weight_bytes: int
    step_age: float
