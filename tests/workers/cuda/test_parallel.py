"""Several GPUs against one: the same model through the mesh, by kernels, graphs and sums of every size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshlm import LLM, SamplingParams

if torch.cuda.device_count() < 2:
    pytest.skip("needs several CUDA devices", allow_module_level=True)

from engine_driver import in_bfloat16
from quantised_models import KINDS, LARGER, Reference, write

pytestmark = pytest.mark.gpu
TOKENS, NEAR = 24, 0.125  # two steps of a bfloat16 logit of about 10
AGREED = 0.95  # of the tokens: with random weights about 3 in 100 are as likely as another, as far as bfloat16 can tell
SHAPE: dict[str, Any] = {
    "vocab_size": 4099,  # divides by no number of ranks
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = [[5 + (31 * n + 7 * i) % 4000 for i in range(3 + 5 * n % 160)] for n in range(100)]  # more than 64 at a time
LAYOUTS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]
WIDE = [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tokenizers
    import transformers

    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return str(folder)


FP8 = {"fp8-static": 1, "compressed-channel": 2}
"""How often a token's scale is found: each rank finds one of its share of the inputs, unless the file says it."""


@pytest.mark.parametrize("kind", FP8)
def test_fp8_over_two_gpus(kind: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts, in float32's measure."""
    import tokenizers

    theirs, _ = write(tmp_path, KINDS[kind], **LARGER)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    for path, module in theirs.named_modules():
        if isinstance(module, Reference) and path.endswith(("o_proj", "down_proj")):
            module.ranks = FP8[kind]
    llm = LLM(
        str(tmp_path),
        device="cuda",
        dtype="bfloat16",
        max_model_len=512,
        kv_cache_memory=1 << 28,
        tensor_parallel_size=2,
    )
    try:
        answers = llm.generate(PROMPTS[:9], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    finally:
        llm.shutdown()
    given = torch.tensor(
        [
            at[token].logprob
            for prompt, answer in zip(PROMPTS, answers, strict=False)
            for at, token in zip((answer.prompt_logprobs or [])[1:], prompt[1:], strict=True)
            if at is not None
        ]
    )
    exact = logprobs(theirs.cuda(), PROMPTS[:9])
    rounded = logprobs(in_bfloat16(theirs), PROMPTS[:9])
    ours, error = (float((each - exact).abs().mean()) for each in (given, rounded))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, the definition's own {error:.4f}"


def logprobs(theirs: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Of all tokens of prompts that follow another one."""
    device, found = next(theirs.parameters()).device, []
    for prompt in prompts:
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt[:-1]], device=device)).logits[0].float()
        found.append(logits.log_softmax(-1).cpu()[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])])
    return torch.cat(found)


Answer = tuple[list[int], list[float], list[int]]


def answers(model: str, **layout: int) -> list[Answer]:
    """For each prompt: greedy tokens and their logprobs by the general sampler, and greedy tokens by graphs and kernels."""
    llm = LLM(model, device="cuda", max_model_len=512, max_num_seqs=128, kv_cache_memory=1 << 30, **layout)
    try:
        general = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
        first = llm.generate(PROMPTS, general, use_tqdm=False)
        plain = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        second = llm.generate(PROMPTS, plain, use_tqdm=False)
    finally:
        llm.shutdown()
    found = []
    for one, other in zip(first, second, strict=True):
        tokens, positions = one.outputs[0].token_ids, one.outputs[0].logprobs or []
        logprobs = [position[token].logprob for token, position in zip(tokens, positions, strict=True)]
        found.append((tokens, logprobs, other.outputs[0].token_ids))
    return found


@pytest.fixture(scope="module")
def alone(model: str) -> list[Answer]:
    return answers(model)


@pytest.mark.parametrize(
    "layout", LAYOUTS + WIDE, ids=lambda layout: "-".join(f"{k[0]}p{v}" for k, v in layout.items())
)
def test_the_same_answers_as_one_gpu(layout: dict[str, int], model: str, alone: list[Answer]) -> None:
    """Token by token as long as they agree; they may part where two tokens are as likely as rounding can tell."""
    need = 4 if layout in WIDE else 2
    if torch.cuda.device_count() < need:
        pytest.skip(f"needs {need} GPUs")
    agreed = total = 0
    for (tokens, logprobs, plain), (other, other_logprobs, _) in zip(answers(model, **layout), alone, strict=True):
        for place in range(TOKENS):
            total += 1
            assert abs(logprobs[place] - other_logprobs[place]) < NEAR, (place, tokens, other)
            if tokens[place] != other[place]:
                break
            agreed += 1
        assert len(plain) == TOKENS
        same = next((i for i in range(TOKENS) if plain[i] != tokens[i]), TOKENS)
        agreed, total = agreed + same, total + min(TOKENS, same + 1)
    assert agreed / total > AGREED, f"{agreed} of {total}"
