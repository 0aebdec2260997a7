"""Every metric of the server, in one table: name, kind, JSON field, and how processes combine.

`combine`: "total" adds what every process ever counted; "sum" adds the gauges of live processes; "max" takes the
largest, which for a constant is the constant. A name that nothing feeds yet stays at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
Combine = Literal["total", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` without the `flare_` prefix. `field`: its key in the JSON view, None when it has none. `text`: shown in
    the text view. `labels`: label sets, in text form, that exist from the start; others appear once counted."""

    name: str
    kind: Kind
    combine: Combine
    help: str
    field: str | None = None
    text: bool = True
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The series that exist before anything was counted."""
        if self.kind == "histogram":
            buckets = [f'{self.name}_bucket{{le="{bound}"}}' for bound in (*self.labels, "+Inf")]
            return (*buckets, f"{self.name}_sum", f"{self.name}_count")
        if self.labels:
            return tuple(f"{self.name}{{{labels}}}" for labels in self.labels)
        return (self.name,)


def _total(name: str, help: str, field: str | None = None, *labels: str) -> Metric:
    return Metric(f"{name}_total", "counter", "total", help, field, labels=labels)


def _sum(name: str, help: str, field: str | None = None) -> Metric:
    return Metric(name, "gauge", "sum", help, field)


def _same(name: str, help: str, field: str | None = None) -> Metric:
    return Metric(name, "gauge", "max", help, field)


def _image(name: str, help: str, *, gauge: bool = False) -> Metric:
    if gauge:
        return Metric(name, "gauge", "sum", help, name)
    return Metric(f"{name}_total", "counter", "total", help, f"{name}_total")


def _histogram(name: str, help: str, bounds: tuple[int, ...]) -> Metric:
    return Metric(name, "histogram", "total", help, labels=tuple(str(bound) for bound in bounds))


_TOKENS: Final = (0, 64, 256, 1024, 4096, 16384, 65536, 262144)
_NANOSECONDS: Final = (10**5, 10**6, 10**7, 10**8, 10**9, 10**10)

TABLE: Final[tuple[Metric, ...]] = (
    _total("prefill_tokens", "Prompt tokens consumed by completed prefill.", "prefill_tokens"),
    _total("generated_tokens", "Committed generated tokens, EOS and withheld ones included.", "generated_tokens"),
    _same("decode_weight_bytes", "Bytes of weights that one decode step reads for one request.", "decode_weight_bytes"),
    Metric("draft_steps", "counter", "total", "Draft positions run by the learned drafter.", "draft_steps", text=False),
    _total("speculative_rounds", "Completed speculative or verification steps.", "verify_steps"),
    _total("verification_draft_tokens", "Draft positions of progressing request rounds.", "verification_drafts"),
    _total("verification_request_rounds", "Progressing decode or verification request rounds.", "verification_rounds"),
    _total("accepted_draft_tokens", "Accepted draft tokens, without the bonus token.", "accepted_drafts"),
    _total("draft_request_rounds", "Request rounds that offered at least one draft.", "draft_rounds"),
    _sum("active_requests", "Model slots with a live request.", "active"),
    _sum("pending_requests", "Requests waiting in the model scheduler.", "pending"),
    _total("requests_completed", "Requests whose generation completed successfully.", "completed"),
    _total("reasoning_budget_cuts", "Requests whose reasoning was closed by their budget.", "reasoning_budget_cuts"),
    _total("requests_failed", "Requests failed by admission, execution, grammar or output.", "failed"),
    _total("replay_gpu_nanoseconds", "Sum of the longest rank-local device time of each step.", "replay_gpu_ns"),
    _total("replay_readiness_wait_nanoseconds", "Exposed embedding readiness delay.", "replay_readiness_wait_ns"),
    _total("replay_readiness_samples", "Completed steps with readiness timing.", "replay_readiness_samples"),
    _total("cache_reused_tokens", "Tokens covered by device prefix-cache hits.", "reused_tokens"),
    _sum("cached_kv_pages", "KV pages owned by immutable checkpoints.", "cached_pages"),
    _sum("free_kv_pages", "KV pages reusable after completed device fences.", "free_pages"),
    _same("total_kv_pages", "Pages in the per-rank KV pool.", "total_pages"),
    _same("kv_page_tokens", "Logical history tokens of a KV page.", "page_tokens"),
    _total("host_cache_hits", "Host prefix-store lookups whose chain was fetched.", "host_hits"),
    _total("host_cache_reused_tokens", "Tokens covered by host chains beyond the device's.", "host_reused_tokens"),
    _sum("host_cache_memory_records", "Checkpoint records in the host store's memory.", "host_memory_records"),
    _sum("host_cache_disk_records", "Checkpoint records in the record directory.", "host_disk_records"),
    _total("host_cache_bytes_out", "Bytes copied from device checkpoints to the host store.", "host_bytes_out"),
    _total("host_cache_bytes_in", "Bytes copied from the host store into device memory.", "host_bytes_in"),
    Metric("learned_drafter", "gauge", "max", "The model has a learned drafter.", "learned_drafter", text=False),
    _same("history_drafts_enabled", "Shared decoded history augments learned proposals."),
    _total(
        "checkpoint_captures",
        "Checkpoints captured on the device.",
        None,
        *(f'role="{role}"' for role in ("anchor", "message", "endpoint")),
    ),
    _total(
        "checkpoint_skips",
        "Checkpoint selections or captures rejected.",
        None,
        *(f'reason="{reason}"' for reason in ("unknown_cost", "work_budget", "storage")),
    ),
    _total("checkpoint_extra_work_nanoseconds", "Charged predicted extra prefill and copy work."),
    _sum("checkpoint_anchor_reservations", "Unused anchor guards."),
    _total("host_cache_copyout_headroom_deferrals", "Copy-out offers deferred by the headroom check."),
    _total("host_cache_held", "Records held by the host store.", None, 'tier="dram"', 'tier="nvme"'),
    _total(
        "host_cache_dropped",
        "Records dropped by the host store.",
        None,
        *(
            f'tier="{tier}",reason="{reason}"'
            for tier in ("dram", "nvme")
            for reason in ("end_of_chain", "oversize", "io_error")
        ),
    ),
    _sum("host_cache_parked_records", "Complete DRAM copies awaiting disk writes."),
    _total("host_cache_store_skipped", "Stores skipped, duplicates and retries included."),
    _sum("host_cache_slots_in_use", "Local checkpoint pool slots in use, staging included."),
    _sum("host_cache_slots_total", "Local checkpoint pool slots, automatic intake included."),
    _sum("host_cache_intake_slots", "Local checkpoint pool slots added for intake."),
    _histogram("host_cache_missing_tokens", "Prompt tokens missing on the device at a host lookup.", _TOKENS),
    _histogram("host_cache_estimated_transfer_ns", "Predicted transfer time of a host lookup.", _NANOSECONDS),
    _histogram("host_cache_estimated_prefill_ns", "Predicted prefill time of a host lookup.", _NANOSECONDS),
    _total("speculative_rounds_by_batch", "Verification steps by batch size.", None, 'batch="1"'),
    _total("speculative_rounds_by_width", "Verification steps by draft width.", None, 'width="0"'),
    _total("proposed_draft_tokens_by_depth", "Proposed draft tokens by depth.", None, 'depth="1"'),
    _total("accepted_draft_tokens_by_depth", "Accepted draft tokens by depth.", None, 'depth="1"'),
    _total("proposals", "Draft proposals by source.", None, 'source="learned"', 'source="history"'),
    _total(
        "graph_launches",
        "Steps launched, by kind.",
        None,
        *(f'kind="{kind}"' for kind in ("prefill", "decode", "mixed", "verify", "vision")),
    ),
    _total("engine_steps", "Steps committed."),
    _total("engine_rebuilds", "Rank groups started anew after a loss."),
    _total("preempted_requests", "Requests that gave up their pages to an older one."),
    _total("embedding_row_cache_hits", "Embedding rows found in the row cache."),
    _total("embedding_row_cache_misses", "Embedding rows fetched into the row cache."),
    _sum("embedding_row_cache_rows", "Embedding rows held by the row cache."),
    _sum("http_slots_in_use", "HTTP slots of choices in flight or awaiting their reader."),
    _sum("http_slots", "HTTP slots of all Engine replicas."),
    _sum("http_admission_paused", "Engine replicas whose admission is paused."),
    _sum("http_requests_entering", "Generation requests being read, decoded or lowered."),
    _sum("http_body_bytes", "Bytes of request bodies being read, decoded or lowered."),
    _same("uptime_seconds", "Seconds since the server started."),
    _same("engine_replicas", "Engine replicas that report.", "engine_replicas"),
    _image("input_decoded_images", "Images decoded."),
    _image("input_preprocessed_images", "Images preprocessed for a vision step."),
    _image("input_skipped_images", "Images whose whole span a restored prefix covered."),
    _image("input_cache_hits", "Prepared inputs found in the input cache."),
    _image("input_cache_misses", "Prepared inputs not found in the input cache."),
    _image("input_cache_bytes", "Bytes held by the input cache.", gauge=True),
    _image("input_cache_records", "Records held by the input cache.", gauge=True),
)
