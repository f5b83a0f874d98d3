"""aLoRA: before its invocation a prompt is the base's, tokens and KV; behind it the tokens are those of peft's own modules."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from adapters import AdapterBench, adapter_in, save_adapters
from bench import limits
from served_engines import AGAIN, BLOCK, LENGTH, OUTPUT, STEP, Engines
from small_models import SMALL

from meshlm.protocol.adapters import Adapter

INVOCATION = [9, 8, 9]
BEFORE = [(7 + 31 * at) % 200 for at in range(21)]
OTHER = [(11 + 17 * at) % 200 for at in range(19)]
PROMPTS = {
    0: [*BEFORE, *INVOCATION, 5, 6],
    1: [*BEFORE, *INVOCATION, 3],
    2: BEFORE,  # nobody calls it
    3: [*BEFORE[:6], *INVOCATION, *BEFORE, *INVOCATION, 8, 9, 4],  # twice: the last counts
    4: [*INVOCATION, *BEFORE],
    5: BEFORE[:13],
}
NAMES = {0: "one", 1: "two", 2: "one", 3: "one", 4: "two", 5: "plain"}
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "alora_invocation_tokens": INVOCATION},
    "two": {"r": 4, "target_modules": ["k_proj", "o_proj"], "alora_invocation_tokens": INVOCATION},
    "plain": {"r": 4, "target_modules": ["q_proj", "up_proj"]},
}


class Case:
    def __init__(self, folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        config = transformers.Qwen2Config(**{**SMALL, "initializer_range": 0.2})
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        theirs.save_pretrained(folder)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
        self.folder, self.theirs = folder, save_adapters(theirs, folder / "adapters", CONFIGS)

    def adapter(self, engines: Engines, name: str, prompt: list[int]) -> Adapter:
        found = adapter_in(self.folder / "adapters", name, engines.engines[0].resolved.spec)
        return found.in_prompt(array("i", prompt))

    def expected(self, prompt: list[int], tokens: list[int], name: str) -> list[int]:
        """The likeliest tokens. peft looks for the invocation in all that it is given: here in the prompt alone, as it does when it
        generates."""
        self.theirs.set_adapter(name)
        text, config = torch.tensor([prompt + tokens[:-1]]), self.theirs.peft_config[name]
        more: dict[str, Any] = {}
        if config.alora_invocation_tokens:
            places = [at for at in range(len(prompt)) if prompt[at : at + len(INVOCATION)] == INVOCATION]
            more = {"alora_offsets": [len(text[0]) - places[-1] if places else None]}
        with torch.no_grad():
            logits = self.theirs(text, **more).logits
        likeliest: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        return likeliest


@pytest.mark.parametrize(("backend", "tp", "pp"), [("cpu", 1, 1), ("torch", 2, 1), ("cpu", 1, 3)])
def test_tokens_are_pefts_and_the_prefix_is_the_bases(backend: str, tp: int, pp: int, tmp_path: Path) -> None:
    case = Case(tmp_path)
    engines = Engines(tmp_path, 20 if tp == pp == 1 else 40, backend, tp, pp, enable_lora=True, max_loras=2)
    bounds = limits(max_model_len=LENGTH, max_num_batched_tokens=STEP, num_stages=pp, max_loras=2)
    bench = AdapterBench(bounds, 0, 0, model=engines)
    engines.cached = bench.directory._hashes
    try:
        for at, prompt in PROMPTS.items():
            bench.ask(at, prompt, case.adapter(engines, NAMES[at], prompt))
        bench.finish()
        for at, prompt in PROMPTS.items():
            tokens = bench.tokens[at]
            assert len(tokens) == OUTPUT
            assert tokens == case.expected(prompt, tokens, NAMES[at]), at
        bench.ask(AGAIN[0], OTHER, None)
        bench.finish()
        called = [*OTHER, *INVOCATION, 5]
        bench.ask(AGAIN[1], called, case.adapter(engines, "one", called))
        bench.finish()
        assert bench.tokens[AGAIN[1]] == case.expected(called, bench.tokens[AGAIN[1]], "one")
    finally:
        engines.close()
    assert bench.cached[AGAIN[1]] == len(OTHER) // BLOCK * BLOCK, "the base's KV up to the invocation"
    assert bench.tokens[0] != bench.tokens[1], "the adapters are to be no trifle"
