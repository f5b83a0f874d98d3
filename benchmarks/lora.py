"""What adapters cost: steps with and without them, loads beside streams, and what a thousand loads and unloads leave behind.

    python -P benchmarks/lora.py [--parts base lora load churn] [--json FILE]            Llama 3.1 8B's shapes on a GPU
    python -P benchmarks/lora.py --device cpu --parts steps churn [--json FILE]          a small model on a CPU

base: streams of a mesh without --enable-lora. lora: of one with it: of the base alone, each with an adapter of its own, and half of
them with one. load: a new adapter, from the request that loads it until the first token, beside running streams. churn: loads, each
with a request, and unloads. steps: of the engine alone, with and without --enable-lora in turns, of rows without adapters. Weights are
random. A part that fails, or takes longer than its limit, is written down as such, and the next one begins.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
import shapes
from harness import KeptStream, Mesh

Report = dict[str, Any]
BASE, PROMPT, WARM_LOADS = "base", 32, 50
MODULES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def model(into: Path, device: str) -> tuple[Path, dict[str, Any]]:
    """A folder with the configuration and a tokenizer of as many words."""
    from tokenizers import Tokenizer, decoders, models

    config: dict[str, Any] = shapes.config_of("llama3-8b") if device == "cuda" else SMALL
    folder = into / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    made: Any = Tokenizer(models.WordLevel({f" w{nth}": nth for nth in range(config["vocab_size"])}, unk_token=" w0"))
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return folder, config


def write_adapter(folder: Path, config: dict[str, Any], rank: int, modules: list[str], seed: int) -> Path:
    """Random, as peft writes it."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"] * (hidden // heads)
    sizes = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (hidden, hidden)}
    sizes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    dtype, generator = getattr(torch, config["torch_dtype"]), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, names in MODULES.items():
            for name in (name for name in names if name in modules):
                stem, (inputs, outputs) = f"base_model.model.model.layers.{layer}.{part}.{name}", sizes[name]
                for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    values = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{stem}.lora_{kind}.weight"] = values.to(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


# --- a mesh ---


def flags_of(given: argparse.Namespace, folder: Path, *, lora: bool) -> list[str]:
    own = ["--model", str(folder), "--served-model-name", BASE, "--load-format", "dummy", "--device", given.device]
    own += ["--max-model-len", "2048", "--max-num-seqs", str(max(2, given.streams + 1))]
    own += ["--kv-cache-memory", "16M", "--cpu-threads", "1"] if given.device == "cpu" else []
    if lora:
        own += ["--enable-lora", "--max-loras", str(given.adapters), "--max-lora-rank", str(given.rank)]
        own += ["--allow-runtime-lora-updating", "--max-cpu-loras", str(2 * given.adapters)]
    return [*own, *given.flags]


def posted(mesh: Mesh, path: str, body: Report) -> bytes:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{mesh.port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def load(mesh: Mesh, name: str, folder: Path) -> None:
    posted(mesh, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def unload(mesh: Mesh, name: str) -> None:
    posted(mesh, "/v1/unload_lora_adapter", {"lora_name": name})


def body_of(model: str, nth: int, tokens: int) -> Report:
    prompt = [(7 * nth + 3 * at) % 500 for at in range(PROMPT)]
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


async def streams(mesh: Mesh, models: list[str], tokens: int) -> list[KeptStream]:
    """One for each, all at once, to their ends. RuntimeError where one has failed."""
    found = [await KeptStream.begin(mesh.port, body_of(name, nth, tokens)) for nth, name in enumerate(models)]
    await asyncio.gather(*(one.done for one in found))
    if broken := [bytes(one.data[:300]) for one in found if not one.complete]:
        raise RuntimeError(f"{len(broken)} of {len(found)} streams failed: {broken[0]!r}")
    return found


def paces(found: list[KeptStream]) -> Report:
    """While all of them run: tokens a second of all, and the gaps between those of each."""
    begin, end = max(one.times[0] for one in found), min(one.times[-1] for one in found)
    inside = [[at for at in one.times if begin <= at <= end] for one in found]
    gaps = [after - before for times in inside for before, after in pairwise(times)]
    return {"tok_s": round(sum(map(len, inside)) / (end - begin), 1), "itl_ms": harness.milliseconds(gaps)}


def best(mesh: Mesh, models: list[str], given: argparse.Namespace, of: Callable[[list[KeptStream]], Report]) -> Report:
    """The median of several rounds, after one that captures what is captured late."""
    asyncio.run(streams(mesh, models, given.tokens))
    rounds = [of(asyncio.run(streams(mesh, models, given.tokens))) for _ in range(given.rounds)]
    return sorted(rounds, key=lambda one: one["tok_s"])[len(rounds) // 2]


# --- parts ---


def base(given: argparse.Namespace, folder: Path, config: dict[str, Any]) -> Report:
    with Mesh(flags_of(given, folder, lora=False)) as mesh:
        return {"ready_s": round(mesh.ready_s, 1), **best(mesh, [BASE] * given.streams, given, paces)}


def adapters_in(given: argparse.Namespace, folder: Path, config: dict[str, Any], count: int) -> list[Path]:
    return [
        write_adapter(folder.parent / f"adapter-{nth}", config, given.rank, given.modules, nth) for nth in range(count)
    ]


def lora(given: argparse.Namespace, folder: Path, config: dict[str, Any]) -> Report:
    paths = adapters_in(given, folder, config, given.adapters)
    names = [f"a{nth}" for nth in range(given.adapters)]
    with Mesh(flags_of(given, folder, lora=True)) as mesh:
        for name, path in zip(names, paths, strict=True):
            load(mesh, name, path)
        own = [names[nth % len(names)] for nth in range(given.streams)]
        mixed = [name if nth % 2 else BASE for nth, name in enumerate(own)]
        found = {"ready_s": round(mesh.ready_s, 1), "base_only": best(mesh, [BASE] * given.streams, given, paces)}
        found["each_its_own"] = best(mesh, own, given, paces)
        found["half"] = best(mesh, mixed, given, paces)
        found["half_base_rows"] = best(mesh, mixed, given, lambda all_: paces(all_[::2]))
        return found


async def _loaded(mesh: Mesh, given: argparse.Namespace, paths: list[Path], names: list[str]) -> Report:
    count = given.streams - 1
    running = [await KeptStream.begin(mesh.port, body_of(name, nth, 1900)) for nth, name in enumerate(names[:count])]
    while not all(one.times for one in running):  # noqa: ASYNC110 - a stream counts what comes, and tells nobody
        await asyncio.sleep(0.01)
    await asyncio.sleep(given.seconds)
    firsts, begun = [], time.perf_counter()
    for nth, path in enumerate(paths):
        at = time.perf_counter()
        await asyncio.to_thread(load, mesh, f"late{nth}", path)
        one = await KeptStream.begin(mesh.port, body_of(f"late{nth}", nth, 1))
        await one.done
        if not one.complete:
            raise RuntimeError(bytes(one.data[:300]))
        firsts.append(one.times[0] - at)
        await asyncio.to_thread(unload, mesh, f"late{nth}")
    ended = time.perf_counter()
    for one in running:
        one.transport.close()
    pairs = [both for one in running for both in pairwise(one.times)]
    before = [later - at for at, later in pairs if later < begun]
    beside = [later - at for at, later in pairs if begun <= at and later <= ended]
    found = {"alone_itl_ms": harness.milliseconds(before), "beside_itl_ms": harness.milliseconds(beside)}
    return {"until_first_token_ms": harness.milliseconds(firsts), **found}


def load_beside(given: argparse.Namespace, folder: Path, config: dict[str, Any]) -> Report:
    paths = adapters_in(given, folder, config, given.adapters + given.late)
    names = [f"a{nth}" for nth in range(given.adapters)]
    given.adapters += 1  # a slot for the one that comes
    with Mesh(flags_of(given, folder, lora=True)) as mesh:
        for name, path in zip(names, paths, strict=False):
            load(mesh, name, path)
        own = [names[nth % len(names)] for nth in range(given.streams)]
        asyncio.run(streams(mesh, own, 64))
        return asyncio.run(_loaded(mesh, given, paths[len(names) :], own))


def gpu_mib() -> float | None:
    """What the first GPU has taken; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return float(told.strip())


def memory(mesh: Mesh) -> Report:
    return {"rss_mib": mesh.rss_mib(), "gpu_mib": gpu_mib()}


def churn(given: argparse.Namespace, folder: Path, config: dict[str, Any]) -> Report:
    """Names and files differ from one load to the next; each is asked for a token, so that a worker has it. Before that all of a CPU's
    KV cache is used: the host gives memory when it is written first."""
    paths, found = adapters_in(given, folder, config, given.late), dict[str, Any]()
    given.adapters = 2
    with Mesh(flags_of(given, folder, lora=True)) as mesh:
        asyncio.run(streams(mesh, [BASE] * given.streams, 1900))
        begun, failed = time.perf_counter(), 0
        for nth in range(WARM_LOADS + given.loads):
            if nth == WARM_LOADS:
                found["before"], begun = memory(mesh), time.perf_counter()
            load(mesh, f"a{nth}", paths[nth % len(paths)])
            try:
                posted(mesh, "/v1/completions", body_of(f"a{nth}", nth, 1))
            except OSError:
                failed += 1
            unload(mesh, f"a{nth}")
        seconds = time.perf_counter() - begun
        found["after"] = memory(mesh)
    found |= {"loads": given.loads, "failed": failed, "load_ask_unload_ms": round(1e3 * seconds / given.loads, 2)}
    before, after = found["before"], found["after"]
    found["rss"] = {name: round(after["rss_mib"][name] / mib, 4) for name, mib in before["rss_mib"].items()}
    if before["gpu_mib"]:
        found["gpu"] = round(after["gpu_mib"] / before["gpu_mib"], 4)
    return found


def steps(given: argparse.Namespace, folder: Path, config: dict[str, Any]) -> Report:
    """By the time of the process, which others on the machine do not take."""
    from engine_step import decodes, fill, make_engine, prompts

    values: list[str | int] = [
        "--device",
        given.device,
        "--dtype",
        config["torch_dtype"],
        "--max-num-seqs",
        given.streams,
    ]
    values += ["--max-model-len", 2048]
    values += ["--kv-cache-memory", 1 << 28, "--cpu-threads", 1] if given.device == "cpu" else []
    lora_flags: list[str | int] = ["--enable-lora", True, "--max-loras", given.adapters]
    engines = [make_engine(str(folder), [*values, *more]) for more in ([], lora_flags)]
    for engine in engines:
        while engine.idle():
            pass
        fill(engine, prompts(given.streams, PROMPT, engine.facts.block_size, 1900, engine.facts.kv_specs), PROMPT)
    times: list[list[float]] = [[], []]
    for nth in range(given.steps):
        for which in (0, 1) if nth % 2 else (1, 0):
            begun = time.process_time() if given.device == "cpu" else time.perf_counter()
            engines[which].step(decodes(given.streams, PROMPT + nth), 0).wait()
            ended = time.process_time() if given.device == "cpu" else time.perf_counter()
            times[which].append(ended - begun)
    without, with_lora = (statistics.median(one[given.steps // 10 :]) for one in times)
    found = {"streams": given.streams, "steps": given.steps, "without_ms": round(1e3 * without, 4)}
    return found | {"with_enable_lora_ms": round(1e3 * with_lora, 4), "speed": round(without / with_lora, 4)}


PARTS: dict[str, Callable[[argparse.Namespace, Path, dict[str, Any]], Report]] = {
    "base": base,
    "lora": lora,
    "load": load_beside,
    "churn": churn,
    "steps": steps,
}


def alone(name: str, given: argparse.Namespace) -> Report:
    """A part in a process of its own, which is ended with all below it when its time is up."""
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--only", name]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, text=True)
        try:
            code = process.wait(given.limit)
        except subprocess.TimeoutExpired:
            for pid in reversed(harness.descendants(process.pid)):
                subprocess.run(["kill", "-KILL", str(pid)], check=False)
            process.wait()
            return {"failed": f"it took longer than {given.limit:.0f} s"}
        out.seek(0)
        lines = out.read().splitlines()
    if code or not lines:
        return {"failed": f"exit code {code}"}
    found: Report = json.loads(lines[-1])
    return found


def compared(parts: Report) -> Report:
    """The figures that goals are set for."""
    found: Report = {}
    base_, lora_ = parts.get("base", {}).get("tok_s"), parts.get("lora", {})
    if base_ and "each_its_own" in lora_:
        found["adapters_of_base"] = round(lora_["each_its_own"]["tok_s"] / base_, 4)
        found["base_only_of_base"] = round(lora_["base_only"]["tok_s"] / base_, 4)
        own, rows = lora_["each_its_own"]["itl_ms"]["p50"], lora_["half_base_rows"]["itl_ms"]["p50"]
        found["base_rows_beside_of_adapter_rows"] = round(own / rows, 4)
    if (late := parts.get("load", {})).get("alone_itl_ms"):
        found["load_itl_p99"] = round(late["beside_itl_ms"]["p99"] / late["alone_itl_ms"]["p99"], 4)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["base", "lora", "load", "churn"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", nargs="+", default=[name for names in MODULES.values() for name in names])
    parser.add_argument("--tokens", type=int, default=512, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of streams alone, before loads")
    parser.add_argument(
        "--late", type=int, default=16, help="adapters that are loaded beside streams, or again and again"
    )
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="of a part")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of meshlm serve")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        with tempfile.TemporaryDirectory(prefix="mlm") as into:
            print(json.dumps(PARTS[given.only](given, *model(Path(into), given.device))))
        return
    parts: Report = {}
    for name in given.parts:
        parts[name] = alone(name, given)
        print(name, json.dumps(parts[name]), flush=True)
        settings = {
            name: getattr(given, name) for name in ("device", "streams", "adapters", "rank", "modules", "tokens")
        }
        harness.keep(given.json, {"settings": settings, "parts": parts, "compared": compared(parts)})


if __name__ == "__main__":
    main()
