"""What docs/performance.md tells of other models and weights, in one run on one machine: job after job, the longest-awaited first.

    python -P benchmarks/one_run.py --out FOLDER --tokenizer FOLDER [--vllm FOLDER --sharegpt FILE] [--gpus 0 1] [--minutes 30]
                                    [--only NAME ...]
    python -P benchmarks/one_run.py --list

Each job is one of the other benchmarks, with a limit; it writes FOLDER/<name>.json and .log. A job whose JSON is there is not done
again, and none is begun that would end behind the minutes: a run that was broken off goes on where it was. Models are of shapes.py.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROWS4 = "1 4 8 16"
FORMATS4 = ("int4, groups of 128, zeros (GPTQ, AWQ)", "int4, groups of 32 (Q4_0)", "Q4_K, Q4_1")
BESIDE = ("offline", "serve")
DENSE = (
    "llama3-1b", "llama3-3b", "llama3-8b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-0.6b",
    "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b", "mistral-nemo", "gemma2-2b", "gemma2-9b", "gemma3-4b",
    "gemma3-12b", "gemma3-27b", "phi3-mini", "phi4",
)  # fmt: skip
OTHERS = ("gpt-oss-20b", "qwen3-30b-a3b", "granite-4-h-tiny", "gemma3-4b", "bamba-9b", "gemma3-27b")


class Job(NamedTuple):
    """A benchmark: its module or file with arguments, of which {models}, {out}, {vllm}, {sharegpt} and {gpus} are filled in."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    gpus: int = 1
    beside: bool = False  # vLLM is measured in the same run: on a GPU of its own, or when it is its turn


def step(name: str, model: str, *flags: str, batches: tuple[str, ...] = ("1",)) -> Job:
    """Decode steps of the engine alone."""
    command = ("engine_step.py", f"{{models}}/{model}", "--batch", *batches, "--context", "512", "--json", "{out}")
    return Job(name, (*command, *flags), 120)


def beside(name: str, *models: str, kinds: tuple[str, ...] = BESIDE, limit_s: int = 1200) -> Job:
    """MeshLM and vLLM through these models."""
    command = ("beside.py", *(f"{{models}}/{model}" for model in models), "--only", *kinds, "--json", "{out}")
    return Job(
        name, (*command, "--vllm", "{vllm}", "--sharegpt", "{sharegpt}", "--gpus", "{gpus}"), limit_s, 2, beside=True
    )


JOBS = (
    Job("few_rows_4_bits", ("weights.py", "--few", "--rows", *ROWS4.split(), "--formats", *FORMATS4, "--json", "{out}"), 240),
    Job("mxfp4_experts", ("-m", "meshlm.kernels.mxfp4_experts.bench", "--json", "{out}"), 120),
    Job("mxfp4_experts_direct", ("-m", "meshlm.kernels.mxfp4_experts.bench", "--direct", "--json", "{out}"), 240),
    Job("prefill_attention", ("-m", "meshlm.kernels.attention.bench", "--json", "{out}"), 240),
    Job("shared_prefix_steps", ("shared_prefix.py", "--quick", "--engine", "{models}/llama3-8b", "--json", "{out}"), 180),
    step("kernels_llama3_8b_fp8", "llama3-8b", "--kernels", "--quantization", "fp8", batches=("1", "64")),
    step("kernels_llama3_8b_awq", "llama3-8b+awq", "--kernels", batches=("1", "64")),
    beside("beside_llama3_8b_awq", "llama3-8b+awq"),
    beside("beside_llama3_8b_fp8", "llama3-8b@--quantization fp8"),
    beside("beside_qwen2.5_7b", "qwen2.5-7b"),
    beside("beside_long", "llama3-8b", kinds=("long", "longest")),
    *(beside(f"beside_{name}", name) for name in OTHERS),
    Job("dense_steps", ("dense_steps.py", *(f"{{models}}/{name}" for name in DENSE), "--json", "{out}"), 420),
)  # fmt: skip


def command_of(job: Job, given: argparse.Namespace, models: Path) -> list[str]:
    """What is run. A module is a module, anything else a file beside this one."""
    values = {
        "models": str(models), "out": str(given.out / f"{job.name}.json"), "vllm": given.vllm, "sharegpt": given.sharegpt,
    }  # fmt: skip
    words: list[str] = []
    for word in job.command:
        words += given.gpus[: job.gpus] if word == "{gpus}" else [word.format(**values)]
    return [sys.executable, "-P", *(words if words[0] == "-m" else [str(HERE / words[0]), *words[1:]])]


def why_not(job: Job, given: argparse.Namespace, left_s: float) -> str:
    """Why a job is not begun; "" when it is."""
    if (given.out / f"{job.name}.json").exists() and not job.beside:  # beside.py goes on by itself
        return "its figures are there"
    if len(given.gpus) < job.gpus and not job.beside:
        return f"it takes {job.gpus} GPUs"
    if job.beside and not given.vllm:
        return "it compares with vLLM (--vllm)"
    return f"it may take {job.limit_s} s, and {max(0.0, left_s):.0f} are left" if job.limit_s > left_s else ""


def do(job: Job, command: list[str], log: Path) -> str:
    """Runs a job; what went wrong, "" if nothing."""
    with log.open("ab") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=out, timeout=job.limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"ended: it took longer than {job.limit_s} s"
    return f"exit code {code}, see {log}" if code else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="what would be run")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tokenizer", type=Path, help="folder of a model, for benchmarks/shapes.py")
    parser.add_argument("--vllm", default="", help="folder with vLLM's packages")
    parser.add_argument("--sharegpt", default="", help="sharegpt_1000.json")
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument(
        "--only", nargs="+", choices=[job.name for job in JOBS], default=[job.name for job in JOBS], metavar="NAME"
    )
    given = parser.parse_args()
    models = given.out / "models"
    jobs = [job for job in JOBS if job.name in given.only]
    if given.list:
        print("\n".join(f"{job.name}: {shlex.join(command_of(job, given, models))}" for job in jobs))
        return
    if given.tokenizer is None:
        parser.error("--tokenizer: folder of a model, whose tokenizer the models get")
    import shapes

    for name in {
        word.removeprefix("{models}/").partition("@")[0] for job in jobs for word in job.command if "{models}" in word
    }:
        shapes.write(name, given.tokenizer, models)
    end = time.monotonic() + 60 * given.minutes
    for job in jobs:
        reason = why_not(job, given, end - time.monotonic())
        begun = time.monotonic()
        reason = reason or do(job, command_of(job, given, models), given.out / f"{job.name}.log")
        print(f"{job.name}: {reason or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
