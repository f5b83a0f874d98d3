"""Group-relative policy optimisation of a small model against a mesh that serves: sample, score, train, send the weights, again.

    meshlm serve MODEL --server-dev-mode --weight-transfer-config '{"backend": "ipc"}' --device cpu
    python examples/grpo.py http://localhost:8000 MODEL --updates 20

The mesh samples groups of answers with the newest weights; torch and transformers train a copy of the model on them. What is rewarded
here is simple enough to be seen: even token ids. Each update goes through memory of the same host (weight_sender.py), has a name, and
answers say it: samples of other weights than the newest are not trained on.

It needs torch, transformers and httpx.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from weight_sender import MemorySender

GROUP, ANSWER = 8, 8  # answers to each prompt, and their tokens
PROMPTS = [[3, 10, 17, 24], [5, 6, 7], [40, 30, 20, 10, 9]]


class Sample(NamedTuple):
    """An answer, with what the mesh says of each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the policy that has sampled it
    version: str


def sampled(url: str, seed: int) -> list[Sample]:
    """GROUP answers to each of PROMPTS."""
    found = []
    with httpx.Client(timeout=600) as http:
        for number, prompt in enumerate(PROMPTS):
            body = {
                "prompt": prompt,
                "n": GROUP,
                "max_tokens": ANSWER,
                "ignore_eos": True,
                "seed": seed + number,
                "temperature": 1.0,
                "logprobs": 1,
                "return_token_ids": True,
            }
            answer = http.post(f"{url}/v1/completions", json=body).raise_for_status().json()
            version = answer["usage"].get("weights_version", "0")
            found += [
                Sample(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], version)
                for choice in answer["choices"]
            ]
    return found


def reward(sample: Sample) -> float:
    return sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens)


def advantages(rewards: list[float]) -> Tensor:
    """Each answer against the others of its group: [prompts * GROUP]."""
    groups = torch.tensor(rewards).view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(model: Any, samples: list[Sample], advantage: Tensor) -> Tensor:
    """The clipped objective of PPO, a mean over tokens, without a critic."""
    losses = []
    for sample, value in zip(samples, advantage, strict=True):
        ids = torch.tensor([sample.prompt + sample.tokens])
        logits = model(ids).logits[0, len(sample.prompt) - 1 : -1]  # [tokens, vocabulary]
        now = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt) :, None])[:, 0]
        ratio = (now - torch.tensor(sample.logprobs)).exp()
        losses.append(-torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value).mean())
    return torch.stack(losses).mean()


def train(url: str, model: Any, updates: int, on_update: Callable[[int], None] = lambda _: None) -> list[float]:
    """The mean reward of each round. on_update: is called when the mesh has the weights of an update."""
    sender = MemorySender(url)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rewards = []
    try:
        for number in range(1, updates + 1):
            samples = sampled(url, seed=1000 * number)
            newest = f"step-{number - 1}" if number > 1 else "0"
            if {sample.version for sample in samples} != {newest}:
                raise RuntimeError(f"samples of weights {sorted({one.version for one in samples})}, not {newest}")
            scores = [reward(sample) for sample in samples]
            optimizer.zero_grad()
            loss_of(model, samples, advantages(scores)).backward()
            optimizer.step()
            sender.send(model.named_parameters(), f"step-{number}")
            rewards.append(sum(scores) / len(scores))
            print(json.dumps({"update": number, "reward": round(rewards[-1], 4)}), flush=True)
            on_update(number)
    finally:
        sender.close()
    return rewards


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", help="its folder, or its name on the hub")
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    train(arguments.url, model, arguments.updates)


if __name__ == "__main__":
    main()
