"""Words that users of other servers type out of habit: what they are here. Pure; called by main.py before anything is parsed."""

from collections.abc import Sequence

from meshlm.supervisor.errors import UsageError

FIRST_STEPS = """meshlm serves large language models to clients of OpenAI's API.

  meshlm serve                   serve the model that comes with it, SmolLM2-135M-Instruct
  meshlm serve MODEL             a folder, a .gguf file, or a name on the hub
  meshlm chat                    talk to it, from another terminal
  meshlm status                  what runs
  meshlm doctor                  whether this machine is ready for it

meshlm --help lists all commands, meshlm serve --help all flags."""
_FETCHED = "a mesh serves the model that it is started with, and fetches it: meshlm serve MODEL"
COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("--version",),
    "-V": ("--version",),
    "ps": ("status",),
    "stop": ("drain", "--stop"),
}
"""Commands of other programs, as ours."""
INSTEAD = {
    "run": "meshlm serve MODEL serves a model, and meshlm chat talks to it",
    "pull": _FETCHED,
    "list": f"{_FETCHED}; GET /v1/models has its names",
    "ls": f"{_FETCHED}; GET /v1/models has its names",
    "rm": "files of models are where they were fetched to (HF_HOME)",
    "show": "GET /v1/models tells what a running mesh serves, meshlm serve MODEL --dry-run what it would",
}
"""Commands of other programs that none here is, and what to do."""
_FLAGS = {
    "--max-model-len is its name here": "--ctx-size -c --n-ctx --context-length",
    "--cpu-threads is its name here": "--threads -t --threads-batch -tb",
    "--max-num-seqs is its name here": "--parallel -np",
    "--max-num-batched-tokens is its name here": "--batch-size -b -ub",
    "--frontends is its name here": "--workers --threads-http --web-concurrency",
    "--kv-cache-dtype is its name here": "--cache-type-k -ctk --cache-type-v -ctv",
    "--lora-modules is its name here": "--lora --lora-scaled",
    "--served-model-name is its name here": "--alias -a",
    "--ssl-keyfile is its name here": "--ssl-key-file",
    "--ssl-certfile is its name here": "--ssl-cert-file",
    "--tensor-parallel-size says over how many GPUs layers are split": "--split-mode -sm --tensor-split -ts",
    "the model stands behind serve: a folder, a file, a name on the hub": "-m -hf -hfr --hf-repo --hf-file -hff --model-url -mu",
    "all layers are on the GPU; --cpu-offload-gb leaves some to the host": "-ngl --n-gpu-layers --gpu-layers",
    "a request says max_tokens": "--n-predict --predict",
    "attention is always computed so": "--flash-attn -fa",
    "templates are always Jinja's": "--jinja",
    "requests are always batched": "--cont-batching -cb",
    "GET /metrics is always there": "--metrics",
    "files of weights are always mapped": "--mmap --no-mmap --mlock",
    "a process of a new version takes its place by meshlm restart": "--reload",
    "--root-path is its name here": "--api-prefix",
}
FLAGS = {flag: instead for instead, flags in _FLAGS.items() for flag in flags.split()}
"""Flags of llama.cpp and uvicorn that none here is, by what to say of them."""


def translated(argv: Sequence[str]) -> list[str]:
    """The words as this program's own. UsageError for a command or a flag of another program, with what to do."""
    first, *rest = argv or ("",)
    if first in INSTEAD:
        raise UsageError(f"there is no command {first}: {INSTEAD[first]}")
    if first == "help":
        return [*rest, "--help"]
    if first == "serve":
        for flag in (word.partition("=")[0] for word in rest):
            if flag in FLAGS:
                raise UsageError(f"serve: unknown argument {flag}; {FLAGS[flag]}")
    return [*COMMANDS.get(first, (first,)), *rest] if argv else []
