"""Several GPUs against one: decode steps and sums under tensor parallelism, throughput of pipelines and data-parallel ranks.

    python -P benchmarks/parallel.py MODEL [--tp 1 2 4] [--batch 1 64] [--pp 1 2] [--dp 1 2 4] [--json FILE] [meshlm serve flags]

--tp: the GPU engine alone, a process per GPU, no mesh. `step_ms` is the wall time of a decode step with two in flight, `graph_ms` a
replay alone, `all_reduce_us` one sum of so many bytes inside a CUDA graph (the engine's choice, and NCCL), `sums` how many a step has.
--pp, --dp: the whole mesh through the Python API, `--requests` requests for each GPU, all at once; `gpu_idle_share` is the last stage's
time between two steps, the bubble of a pipeline; `busiest_cores` how much of a core the busiest process of each role took, and this
one, which is the client: at 1 it is what holds the mesh up. `by_rank`: what each rank had of the work, by its own word (once a second).
Dummy weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
import harness

SUMS_KIB = (8, 64, 256, 1024, 16384)
IN_A_GRAPH, REPLAYS = 20, 10
LIMIT_S = 170  # of one layout


def flags_of(words: list[str]) -> dict[str, object]:
    """`meshlm serve` flags as settings."""
    from meshlm.supervisor.settings import flags

    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return vars(parser.parse_args(words))


# --- tensor parallelism: one rank of the engine ---


def rank_of_engine(arguments: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """What rank `--rank` of `--tp N` measures; all ranks do the same at the same time."""
    import engine_step
    import torch

    from meshlm.supervisor.settings import flags, resolve
    from meshlm.workers.distributed.membership import Membership
    from meshlm.workers.distributed.placement import WorkerPlacement
    from meshlm.workers.engine.make import make_engine

    (size,) = arguments.tp
    values: dict[str, object] = {
        "model": arguments.model,
        "device": "cuda",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": max(arguments.batch),
        "kv_cache_memory": 24 << 30,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": tuple(arguments.batch),
        "tensor_parallel_size": size,
        "run_dir": arguments.run_dir,
        **flags_of(extra),
    }
    config = resolve.resolve(flags.build(values, None))
    membership = Membership()
    membership.offer(tuple(range(1, size + 1)))
    begun = time.perf_counter()
    engine = make_engine(config, lambda *progress: None, WorkerPlacement.of(config, arguments.rank, membership))
    start_s = round(time.perf_counter() - begun, 1)
    spec = engine.resolved.spec
    found: dict[str, Any] = {"tp": size, "start_s": start_s, "communicator": type(engine.comm).__name__}
    found["decode"] = [
        engine_step.measure(engine, batch, arguments.context, arguments.steps, arguments.kernels)
        for batch in arguments.batch
    ]
    found["sums"] = 2 * spec.num_hidden_layers + 1
    found["fused"] = getattr(engine.comm, "fused", None)  # sums with norms; None: by NCCL
    found["by_products"] = getattr(engine.comm, "one_row", None) is not None  # those of one row
    if size > 1:
        found["all_reduce_us"] = sums(engine.comm, getattr(engine.comm, "_plain", engine.comm), torch)
    found["gpu"] = torch.cuda.get_device_name()
    return found


def sums(chosen: Any, plain: Any, torch: Any) -> dict[str, dict[str, float]]:
    """Microseconds of one sum by its size in KiB."""
    found: dict[str, dict[str, float]] = {}
    for kib in SUMS_KIB:
        x = torch.ones(kib * 512 // 4096 or 1, 4096, dtype=torch.bfloat16, device="cuda")
        found[f"{kib} KiB"] = {
            name: round(graph_us(lambda c=comm, line=x: c.all_reduce(line.clone()), torch), 2)
            for name, comm in (("chosen", chosen), ("nccl", plain))
        }
        found[f"{kib} KiB"]["copy alone"] = round(graph_us(lambda line=x: line.clone(), torch), 2)
    return found


def graph_us(work: Any, torch: Any) -> float:
    """One call's time within a graph of many."""
    work()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(IN_A_GRAPH):
            work()
        graph.capture_end()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (IN_A_GRAPH * REPLAYS)


# --- pipelines and data parallelism: the mesh ---


def mesh(arguments: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Tokens per second of one layout."""
    from meshlm import LLM, SamplingParams
    from meshlm.protocol.edges.control import MeshStats
    from meshlm.protocol.edges.text import TextDeltas

    (pp,), (dp,) = arguments.pp, arguments.dp
    values: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_seqs": 1024 * pp,
        "enable_prefix_caching": False,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        **flags_of(extra),
    }
    begun = time.perf_counter()
    llm = LLM(arguments.model, **values)
    found: dict[str, Any] = {"pp": pp, "dp": dp, "start_s": round(time.perf_counter() - begun, 1)}
    count = arguments.requests * pp * dp
    vocab = llm.vocab_size - 200
    prompts = [[(31 * n + 7 * i) % vocab + 100 for i in range(arguments.input_len)] for n in range(count)]
    params = SamplingParams(max_tokens=arguments.output_len, temperature=0.0, ignore_eos=True)
    llm.generate(prompts[: 64 * pp * dp], SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
    seen: list[tuple[int, int]] = []
    said: list[Any] = []
    client = llm._client
    deliver = client.on_message

    def on_message(peer: Any, message: Any) -> None:
        if isinstance(message, TextDeltas) and message.timings_ns:
            seen.append((message.timings_ns[6], message.timings_ns[7]))
        elif isinstance(message, MeshStats):
            said.append(message)
        deliver(peer, message)

    client.on_message = on_message  # type: ignore[method-assign]
    while not said:
        time.sleep(0.01)
    before, begun = cpu_seconds(llm), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    elapsed, after = time.perf_counter() - begun, cpu_seconds(llm)
    busiest: dict[str, float] = {}
    for (role, number), seconds in after.items():
        share = round((seconds - before.get((role, number), 0.0)) / elapsed, 2)
        busiest[role] = max(busiest.get(role, 0.0), share)
    found["busiest_cores"] = busiest
    found["by_rank"] = by_rank(said)
    llm.shutdown()
    found["requests"], found["elapsed_s"] = count, round(elapsed, 2)
    found["output_tokens_per_s"] = round(count * arguments.output_len / elapsed, 1)
    found["total_tokens_per_s"] = round(count * (arguments.output_len + arguments.input_len) / elapsed, 1)
    middle = seen[len(seen) // 4 : -len(seen) // 4 or None]
    gpu, gap = (sum(step[which] for step in middle) for which in (0, 1))
    found["gpu_idle_share"] = round(gap / (gpu + gap), 4) if gpu else None
    found["steps"] = len(seen)
    return found


def num_steps(graphs: Any) -> int:
    return int(sum(graphs.replays.values()) + sum(graphs.misses.values()))


def by_rank(said: list[Any]) -> dict[str, dict[str, float]]:
    """From the first of these statistics to the last."""
    first = {rank.dp_rank: rank for rank in said[0].ranks}
    found = {}
    for last in said[-1].ranks:
        old = first[last.dp_rank]
        found[str(last.dp_rank)] = {
            "prompt_tokens": last.prompt_tokens - old.prompt_tokens,
            "output_tokens": last.generation_tokens - old.generation_tokens,
            "most_running": max(r.num_running for stats in said for r in stats.ranks if r.dp_rank == last.dp_rank),
            "busy_s": round((last.busy_ns - old.busy_ns) / 1e9, 2),
            "idle_s": round((last.idle_ns - old.idle_ns) / 1e9, 3),
            "steps": num_steps(last.graphs) - num_steps(old.graphs),
        }
    return found


def cpu_seconds(llm: Any) -> dict[tuple[str, int], float]:
    """So far, by role and number."""
    pids = {(process.role, process.index): process.pid for process in llm._background.supervisor.status().processes}
    used = {name: psutil.Process(pid).cpu_times() for name, pid in {**pids, ("client", 0): os.getpid()}.items()}
    return {name: times.user + times.system for name, times in used.items()}


# --- the whole run ---


def start(arguments: argparse.Namespace, words: list[str], **environment: str) -> "subprocess.Popen[str]":
    """This script again, in one of its roles; its last line is the result."""
    command = [sys.executable, "-P", __file__, arguments.model, *words]
    for name in ("batch", "context", "steps", "requests", "input_len", "output_len"):
        value = getattr(arguments, name)
        command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    command += ["--kernels"] if arguments.kernels else []
    return subprocess.Popen(
        [*command, *arguments.extra], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def result(processes: "list[subprocess.Popen[str]]") -> dict[str, Any]:
    """The first one's, once all have ended."""
    until = time.monotonic() + LIMIT_S
    try:
        texts = [process.communicate(timeout=max(0.1, until - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    finally:
        for process in processes:
            process.kill()
    lines = texts[0].strip().splitlines()
    if any(process.returncode for process in processes) or not lines:
        return {"error": f"exit codes {[process.returncode for process in processes]}"}
    return dict(json.loads(lines[-1]))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, nargs="*", default=[])
    parser.add_argument("--pp", type=int, nargs="*", default=[])
    parser.add_argument("--dp", type=int, nargs="*", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="also where the time of a step goes")
    parser.add_argument("--requests", type=int, default=1024, help="for each GPU")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--role", choices=["rank", "mesh"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    arguments, extra = parser.parse_known_args()
    arguments.extra = extra
    if arguments.role:
        print(json.dumps((rank_of_engine if arguments.role == "rank" else mesh)(arguments, extra)), flush=True)
        sys.stdout.flush()
        os._exit(0)  # communicators need not be taken down in order
    report: dict[str, Any] = {"model": Path(arguments.model).name}
    for size in arguments.tp:
        with tempfile.TemporaryDirectory(prefix="mlm") as folder:
            words = ["--role", "rank", "--tp", str(size), "--run-dir", folder]
            ranks = [start(arguments, [*words, "--rank", str(rank)]) for rank in range(size)]
            report.setdefault("tensor_parallel", []).append(result(ranks))
        print(json.dumps(report["tensor_parallel"][-1], indent=1), flush=True)
    layouts = [(pp, 1) for pp in arguments.pp] + [(1, dp) for dp in arguments.dp if dp > 1 or 1 not in arguments.pp]
    for pp, dp in layouts:
        found = result([start(arguments, ["--role", "mesh", "--pp", str(pp), "--dp", str(dp)])])
        report.setdefault("mesh", []).append(found)
        print(json.dumps(found), flush=True)
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
