"""What processes count for /metrics, and how they tell it: each sends its counts since its start, and a frontend shows those of all.

The tables below say which metrics a process has, in vLLM's words where vLLM has the same. docs/metrics.md lists them all.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity


class HistogramCounts(Struct, frozen=True, array_like=True):
    """Observations by bucket, those beyond the last end last."""

    total: float
    counts: tuple[int, ...]


class ProcessCounts(Struct, frozen=True, omit_defaults=True):
    """One process, by metric; counters and gauges also by the value of their label, "" where they have none."""

    counters: dict[str, dict[str, float]] = {}
    gauges: dict[str, dict[str, float]] = {}
    histograms: dict[str, HistogramCounts] = {}


class Counted(Struct, frozen=True, tag="counted"):
    """A process that is no scheduler tells the coordinator its counts, once a second at most, when they have changed."""

    counts: ProcessCounts


class CountsOf(Struct, frozen=True):
    """The counts of a process as frontends get them."""

    process: Identity
    counts: ProcessCounts


class Metric(NamedTuple):
    """One metric without its prefix. `label` is the one that it has beside those of its process."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    label: str = ""
    buckets: tuple[float, ...] = ()


# From 10 microseconds to 10 seconds: hops of a mesh on one host and over a network.
HOP: tuple[float, ...] = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
HOP += (0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_RESIDENCY: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_RESIDENCY += (300, 600, 1200, 1800)


def _hop(text: str) -> Metric:
    return Metric("histogram", text, buckets=HOP)


SCHEDULER: Mapping[str, Metric] = {
    "step_schedule_time_seconds": _hop("From the moment at which a step may be planned to its plan."),
    "step_send_time_seconds": _hop("From a step's plan to its arrival at the worker."),
    "step_launch_time_seconds": _hop("From a plan's arrival at the worker to the launch of its step."),
    "step_device_time_seconds": _hop("That the device computed a step."),
    "step_return_time_seconds": _hop("From a step's end on the device to its result at the scheduler."),
    "iteration_tokens_total": Metric(
        "histogram", "Prompt tokens that a step computed and tokens that it made.", buckets=_STEP_TOKENS
    ),
    "num_requests_waiting_by_reason": Metric(
        "gauge", "Requests that wait for a place in the batch, by reason.", "reason"
    ),
    "num_preemptions_by_reason": Metric("counter", "Preempted requests, by what needed their place.", "reason"),
    "prefix_cache_miss_tokens": Metric("counter", "Prompt tokens that were not found in the prefix cache.", "reason"),
    "prefix_cache_limited_tokens": Metric(
        "counter", "Prompt tokens that other KV groups had, and this one had not.", "kv_group"
    ),
    "external_prefix_cache_queries": Metric(
        "counter", "Prompt tokens that the prefix cache lacked, and that were looked for in stores and at other ranks."
    ),
    "external_prefix_cache_hits": Metric("counter", "Tokens of these that were loaded from there."),
    "kv_loads": Metric("counter", "Loads of KV blocks from elsewhere, by how they ended.", "outcome"),
    "kv_loaded_blocks": Metric("counter", "KV blocks that were loaded, in each KV group."),
    "kv_load_failed_blocks": Metric("counter", "KV blocks whose load failed, so that they were computed."),
    "kv_saved_blocks": Metric("counter", "KV blocks that were saved, by where.", "to"),
    "kv_offload_total_bytes": Metric("counter", "Bytes of KV pages that moved, by direction.", "transfer_type"),
    "kv_offload_total_time": Metric("counter", "Seconds that KV pages took to move, by direction.", "transfer_type"),
    "spec_decode_num_drafts": Metric("counter", "Rows of steps that had drafted tokens."),
    "spec_decode_num_draft_tokens": Metric("counter", "Drafted tokens."),
    "spec_decode_num_accepted_tokens": Metric("counter", "Drafted tokens that were accepted."),
    "spec_decode_num_accepted_tokens_per_pos": Metric(
        "counter", "Accepted tokens by their place in the draft.", "position"
    ),
    "kv_block_lifetime_seconds": Metric("histogram", "From a page's allocation to its eviction.", buckets=_RESIDENCY),
    "kv_block_idle_before_evict_seconds": Metric(
        "histogram", "From a page's last use to its eviction.", buckets=_RESIDENCY
    ),
    "kv_block_reuse_gap_seconds": Metric("histogram", "Between two uses of a page.", buckets=_RESIDENCY),
    "estimated_flops_per_gpu": Metric("counter", "Operations of the model on one GPU, as its shape says."),
    "estimated_read_bytes_per_gpu": Metric(
        "counter", "Bytes that one GPU read from its memory, as the model's shape says."
    ),
    "estimated_write_bytes_per_gpu": Metric(
        "counter", "Bytes that one GPU wrote to its memory, as the model's shape says."
    ),
    "kv_cache_blocks": Metric(
        "gauge", "Pages of the KV cache: used, cached (free, with a known prefix), empty.", "state"
    ),
    "kv_cache_group_blocks": Metric("gauge", "Pages that running requests hold, by KV group.", "kv_group"),
    "kv_cache_fragmentation_perc": Metric(
        "gauge", "Share of the used pages' places that hold no token; 1 is all of it."
    ),
}

DETOKENIZER: Mapping[str, Metric] = {
    "request_encode_time_seconds": _hop("From a prompt's arrival at its detokenizer to its tokens, waiting included."),
    "request_route_time_seconds": _hop("From the question to the coordinator to its answer which rank has a request."),
    "step_decode_time_seconds": _hop("From a step's result at the scheduler to its text leaving the detokenizer."),
    "request_retries": Metric("counter", "Attempts that followed a request's first one, by reason.", "reason"),
}

STORE: Mapping[str, Metric] = {
    "kv_store_queries": Metric("counter", "Keys of KV blocks that schedulers asked the store for."),
    "kv_store_hits": Metric("counter", "Keys among these that it had, by tier.", "tier"),
    "kv_store_hit_rate_ceiling": Metric(
        "gauge", "Share of these keys that a store without any bound would have had, 0 to 1; estimated."
    ),
    "kv_store_stored": Metric("counter", "Keys whose pages were written, by tier.", "tier"),
    "kv_store_refused": Metric("counter", "Offered keys that were not stored, by reason.", "reason"),
    "kv_store_evicted": Metric("counter", "Keys that made room for others, by tier.", "tier"),
    "kv_store_pages": Metric(
        "gauge", "Pages of the store's memory: in use (read or written now), stored, free.", "state"
    ),
    "kv_store_bytes": Metric("gauge", "Bytes of stored pages, by tier.", "tier"),
    "kv_store_capacity_bytes": Metric("gauge", "Bytes that may be stored, by tier.", "tier"),
    "kv_store_paused": Metric("gauge", "1 while a tier fails, and nothing is written there.", "tier"),
    "kv_store_not_read": Metric("counter", "Keys that had a file, and were not read: computing them is as fast."),
    "kv_store_bad_files": Metric("counter", "Files that were not what their names said, and were deleted.", "reason"),
    "kv_store_read_bytes": Metric("counter", "Bytes of pages that were read, by tier.", "tier"),
    "kv_store_written_bytes": Metric("counter", "Bytes of pages that were written, by tier.", "tier"),
}

MEDIA: Mapping[str, Metric] = {
    "media_queries": Metric("counter", "Images that requests brought."),
    "media_hits": Metric("counter", "Images among these that were made ready for an earlier request."),
    "media_refused": Metric("counter", "Requests with images that were refused, by the error's type.", "kind"),
    "media_evicted": Metric("counter", "Images whose file made room for another."),
    "media_files": Metric("gauge", "Files of images in shared memory: in use, kept for later requests.", "state"),
    "media_waiting_for_room": Metric("gauge", "Images that wait for bytes that running requests hold."),
    "media_bytes": Metric("gauge", "Bytes of these files."),
    "media_capacity_bytes": Metric("gauge", "Bytes that they may have (--mm-processor-cache-gb)."),
}
