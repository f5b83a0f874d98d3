"""Flags of `vllm serve` that are not ours: the same by another name, needless here, or not there yet, each with its reason.

A command line that worked with vLLM works, or says in one line what to write instead. Called by flags.py, which adds these flags to
its parser without showing them in the help. docs/from-vllm.md lists them; a test holds it to this table.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

# vLLM's flag -> our setting of the same meaning.
RENAMED = {
    ("--api-server-count", "-asc"): "frontends",
    ("--kv-cache-memory-bytes",): "kv_cache_memory",
    ("--data-parallel-address", "-dpa"): "master_addr",
}

# Values of our settings that have another name there.
VALUES = {
    "attention_backend": {"FLASH_ATTN": "auto", "FLASHINFER": "auto", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"hf": "auto"},
}

# Accepted and without effect: why nothing is lost. The number of their values follows the flag's name.
NEEDLESS = {
    "--trust-remote-code": (0, "no code that comes with a model is ever run"),
    "--disable-uvicorn-access-log": (0, "there is no uvicorn; --disable-log-requests silences the line per request"),
    "--uvicorn-log-level": (1, "there is no uvicorn; --log-level is for all processes"),
    "--disable-log-stats": (0, "no statistics are logged; GET /metrics has them"),
    "--enable-log-requests": (0, "requests are logged unless --disable-log-requests is given"),
    "--max-log-len": (1, "prompts are never logged"),
    "--disable-frontend-multiprocessing": (0, "the mesh is processes"),
    "--distributed-executor-backend": (1, "the supervisor starts one worker per GPU"),
    "--data-parallel-backend": (1, "the supervisor starts one scheduler per rank; other hosts --join"),
    "--max-parallel-loading-workers": (1, "weights are mapped from disk"),
    "--use-tqdm-on-load": (0, "start-up shows what is loaded"),
    "--no-use-tqdm-on-load": (0, "start-up shows what is loaded in one line"),
    "--swap-space": (1, "nothing is swapped: a preempted request is computed again"),
    "--max-seq-len-to-capture": (1, "graphs do not depend on the context's length"),
    "--async-scheduling": (0, "scheduling is always asynchronous (--async-depth)"),
    "--disable-cascade-attn": (0, "there is no cascade attention"),
    "--disable-hybrid-kv-cache-manager": (0, "all layers share one kind of KV block"),
    "--enable-prompt-tokens-details": (0, "usage always has prompt_tokens_details"),
    "--enable-server-load-tracking": (0, "GET /metrics always has the load"),
    "--enable-request-id-headers": (0, "answers always have X-Request-Id"),
    "--disable-fastapi-docs": (0, "no documentation pages are served"),
    "--tokenizer-mode": (1, "tokenizer.json is what is read"),
    "--stream-interval": (1, "a token leaves at once; those that wait behind a slow client leave together"),
}

_LORA = "LoRA adapters are not there yet"
_TOOLS = "tool calls are not parsed yet"
_TLS = "HTTP is not encrypted here; end TLS in a proxy before it (deploy/)"
_PREFILL = "--max-num-batched-tokens bounds what prompts may take of a step"
_CAPTURE = "--cudagraph-mode, --cudagraph-capture-sizes and --compile are the settings"

_QUANTISED = (
    "a GGUF file needs no flag (in float32 on a CPU its weights stay quantised, elsewhere they are dequantised at load); "
    "others are not served quantised yet"
)
# Asks for what is not there: refused, with what to do instead.
ABSENT = {
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--reasoning-parser": "reasoning is not told from the answer yet",
    "--structured-outputs-config": "structured outputs are not there yet",
    "--guided-decoding-backend": "structured outputs are not there yet",
    "--quantization": _QUANTISED,
    "-q": _QUANTISED,
    "--speculative-config": "speculative decoding is not there yet",
    "--kv-transfer-config": "KV transfer between meshes is not there yet",
    "--kv-events-config": "KV events are not published",
    "--cpu-offload-gb": "weights stay on the device; -tp and -pp spread them over several",
    "--enable-expert-parallel": "mixtures of experts are not there yet",
    "--enable-eplb": "mixtures of experts are not there yet",
    "--enable-dbo": "dual batch overlap is not there yet",
    "--runner": "generation is the only task",
    "--task": "generation is the only task",
    "--limit-mm-per-prompt": "images and sound are not there yet",
    "--enable-sleep-mode": "end the mesh instead; its second start takes seconds",
    "--otlp-traces-endpoint": "traces are not exported; --profiler-dir writes them, GET /metrics has histograms",
    "--collect-detailed-traces": "traces are not exported; --profiler-dir writes them, GET /metrics has histograms",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--root-path": "let the proxy before it strip the path",
    "--middleware": "put a proxy before it",
    "--revision": "download the revision first, and serve its folder",
    "--download-dir": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--hf-overrides": "serve a folder with the config.json that you want",
    "--num-gpu-blocks-override": "--kv-cache-memory BYTES sets the size of the KV cache",
    "--override-generation-config": "--generation-config meshlm drops the model's defaults; requests carry their own",
    "--return-tokens-as-token-ids": "a request asks for them with return_token_ids",
    "--enable-force-include-usage": "a request asks for it with stream_options.include_usage",
    "--logits-processors": "logit_bias and penalties are what a request can ask for",
    "--no-async-scheduling": "--async-depth 1 plans a step only when the last is back",
    "--long-prefill-token-threshold": _PREFILL,
    "--max-num-partial-prefills": _PREFILL,
    "--max-long-partial-prefills": _PREFILL,
    "--compilation-config": _CAPTURE,
    "-O": _CAPTURE,
    "--chat-template-content-format": "templates get text content",
}


class _Needless(argparse.Action):
    """Says once that the flag is not needed, and why."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        print(f"meshlm: {option_string} is not needed: {NEEDLESS[option_string][1]}", file=sys.stderr)


class _Absent(argparse.Action):
    """Ends with what to do instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        assert option_string is not None
        parser.error(f"{option_string}: {ABSENT[option_string]}")


def add(parser: argparse.ArgumentParser) -> None:
    """All of the above but RENAMED, whose types flags.py knows."""
    hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    taken = parser._option_string_actions  # a command's own flags win, such as those of `vllm bench`
    for flag, (count, _) in NEEDLESS.items():
        if flag not in taken:
            parser.add_argument(flag, action=_Needless, nargs=count, **hidden)
    for flag in ABSENT:
        if flag not in taken:
            parser.add_argument(flag, action=_Absent, nargs="*", **hidden)


def names(setting: str) -> Iterable[str]:
    """vLLM's other names for our setting."""
    return (name for flags, ours in RENAMED.items() if ours == setting for name in flags)


def did_you_mean(unknown: Sequence[str], known: Iterable[str]) -> str:
    """One line about words that no flag is."""
    flag = next((word.split("=")[0] for word in unknown if word.startswith("-")), unknown[0])
    close = difflib.get_close_matches(flag, list(known), n=1)
    return f"unknown argument {flag}" + (f"; did you mean {close[0]}?" if close else "")
