"""The metrics of vLLM 0.26 that MeshLM has too: name, type, labels, and the ends of a histogram's buckets.

Written from what `vllm serve` exports (facts of its v1 engine's Prometheus logger), to be compared; not made by this code.
"""

ENGINE = ("model_name", "engine")
ONE_TWO_FIVE_TO_4096 = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # with --max-model-len 4096
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"


def seconds(ends: str) -> tuple[float, ...]:
    return tuple(float(end) for end in ends.split())


GAUGES = dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), ENGINE)
COUNTERS = {
    "prefix_cache_queries": ENGINE,
    "prefix_cache_hits": ENGINE,
    "num_preemptions": ENGINE,
    "prompt_tokens": ENGINE,
    "generation_tokens": ENGINE,
    "request_success": (*ENGINE, "finished_reason"),
}
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "request_prompt_tokens": ONE_TWO_FIVE_TO_4096,
    "request_generation_tokens": ONE_TWO_FIVE_TO_4096,
    "request_max_num_generation_tokens": ONE_TWO_FIVE_TO_4096,
    "request_params_max_tokens": ONE_TWO_FIVE_TO_4096,
    "request_params_n": (1, 2, 5, 10, 20),
    "time_to_first_token_seconds": seconds(TTFT),
    "inter_token_latency_seconds": seconds(PER_TOKEN),
    "request_time_per_output_token_seconds": seconds(PER_TOKEN),
    "e2e_request_latency_seconds": seconds(REQUEST),
    "request_queue_time_seconds": seconds(REQUEST),
    "request_inference_time_seconds": seconds(REQUEST),
    "request_prefill_time_seconds": seconds(REQUEST),
    "request_decode_time_seconds": seconds(REQUEST),
}
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
# Finer at their beginning, since small models are faster: vLLM's ends are all there.
FINER = {
    "inter_token_latency_seconds": 3,
    "request_time_per_output_token_seconds": 3,
    **{name: 1 for name, ends in HISTOGRAMS.items() if ends == seconds(REQUEST)},
}
