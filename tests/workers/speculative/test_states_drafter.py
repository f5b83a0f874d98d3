"""Drafters that read a model's states, in an engine: the text is the model's own, drafts are those of a computation from scratch."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from cpu_steps import BLOCK, LENGTH, MODEL, PROMPTS, step, tokens_of
from drafted_steps import add, begun, decode, plain, row_of, verify
from hybrid_cases import CASES as STATES
from small_models import CLASSIC, DEEPSEEK, SMALL
from torch import Tensor

from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.batch import LayerCache, RequestLens, StepInputs
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.speculative.verification import Verification
from meshlm.workers.weights import reload

TOKENS, MOST = 14, 4
MTP: dict[str, Any] = {"num_nextn_predict_layers": 1, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
V3 = SMALL | DEEPSEEK["deepseek-v3"][1] | MTP
V3 |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc"}
GLM = SMALL | CLASSIC["glm4-moe"][1] | MTP | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
NEXT = SMALL | STATES["qwen3-next"][1] | {"max_position_embeddings": LENGTH, "tie_word_embeddings": False}
NEXT |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
OF_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "mlp_only_layers": None,
}
OF_QWEN3_5 |= {"mtp_num_hidden_layers": 1}
QWEN = {**MODEL, "num_hidden_layers": 5}
EAGLE3 = MODEL | {"num_hidden_layers": 1, "tie_word_embeddings": False, "model_type": "llama", "draft_vocab_size": 120}
EAGLE3 |= {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 3, "max_position_embeddings": 32}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek": (V3, {}),
    "glm": (GLM, {}),
    "three layers": (V3 | {"num_nextn_predict_layers": 3}, {}),
    "as many layers as drafts": (GLM | {"num_nextn_predict_layers": MOST}, {}),
    "qwen3-next": (NEXT, {}),
    "qwen3.5": (NEXT | OF_QWEN3_5, {}),
    "eagle3": (QWEN, EAGLE3),
    "eagle": (MODEL, EAGLE3 | {"draft_vocab_size": None}),
}
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
]


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings_of(folder: Path, model: dict[str, Any], drafter: dict[str, Any], **values: object) -> dict[str, object]:
    target = folder_of(folder / "model", model)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(target / "tokenizer.json"))
    asked: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": MOST}
    if drafter:
        method = "eagle3" if drafter.get("draft_vocab_size") else "eagle"
        asked |= {"method": method, "model": str(folder_of(folder / "drafter", drafter))}
    found: dict[str, object] = {"model": str(target), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    found |= {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1, "block_size": BLOCK}
    return found | {"speculative_config": json.dumps(asked)} | values


@pytest.fixture(scope="module", params=CASES)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelEngine]:
    values = settings_of(tmp_path_factory.mktemp("models"), *CASES[request.param])
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    made = make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)
    for model in made.models:  # the small numbers of dummy weights make all logits nearly equal
        for name, weight in model.named_parameters():
            if (
                weight.dim() > 1
                and weight.is_floating_point()
                and not name.startswith(("embed", "head"))
                and "router" not in name
            ):
                weight.data *= 5
    yield made
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


def test_the_text_is_the_models_own(drafting: ModelEngine) -> None:
    expected = plain(drafting, KINDS, TOKENS + MOST)
    texts, drafted = begun(drafting, KINDS), 0
    while min(len(text.tokens) for text in texts) < TOKENS:
        result = decode(drafting, [0, 1, 2], [MOST, 2, MOST])
        add(texts, result, [0, 1, 2])
        drafted += int(np.frombuffer(result.drafted, np.int32).sum())
    for text, wanted in zip(texts, expected, strict=True):
        count = min(len(text.tokens), len(wanted.tokens))
        assert text.tokens[:count] == wanted.tokens[:count]
    assert drafted


def states_of(
    made: ModelEngine, model: Decoder, ids: list[int], start: int, kv: list[LayerCache], *given: Any
) -> Tensor:
    """Of one request alone, in blocks of its own. given: what a drafter takes: states, and the number of its layer."""
    length = start + len(ids)
    size, decodes = made.rows.block_size, int(len(ids) == 1)
    table = torch.arange(-(-LENGTH // size))[None]
    positions = torch.arange(start, length)
    lens = RequestLens(torch.tensor([length]), (len(ids),) * (1 - decodes), (length,) * (1 - decodes), length * decodes)
    groups = made.rows.num_groups
    batch = StepInputs(torch.tensor(ids), positions, (positions,) * groups, (table,) * groups, None, decodes, lens)
    with torch.inference_mode():
        found: Tensor = model(batch, kv, made.compute.attention.step(batch, size), *given)
        return found


def empty(caches: list[LayerCache]) -> list[LayerCache]:
    def like(cache: LayerCache) -> LayerCache:
        if (state := cache.state) is not None:
            state = replace(state, ssm=torch.zeros_like(state.ssm), conv=torch.zeros_like(state.conv))
            return replace(cache, state=state)
        keys = torch.zeros(LENGTH // BLOCK, *cache.keys.shape[1:])
        values = keys if cache.values.data_ptr() == cache.keys.data_ptr() else torch.zeros_like(keys)
        return LayerCache(keys, values, group=cache.group)

    return list(map(like, caches))


def from_scratch(made: ModelEngine, tokens: list[int], count: int) -> list[int]:
    """What is drafted greedily behind these tokens, of which each but the last has a state."""
    drafter, number = made.draft_model, len(made.model.layers)
    assert isinstance(drafter, StateDrafter)
    found = states_of(made, made.model, tokens[:-1], 0, empty(made.compute.caches[:number]))
    if drafter.taps:
        found = made.model.tapped[: len(found)].clone()
    own, ids, layers = empty(made.compute.caches[number:]), list(tokens), len(drafter.layers)
    for nth in range(count):
        if nth < layers:
            found = states_of(made, drafter, ids[1 + nth :], 0, own, found, *((nth,) if nth else ()))
        else:
            more = (layers - 1,) if layers > 1 else ()
            found = states_of(made, drafter, ids[-1:], len(ids) - 1 - layers, own, found[-1:], *more)
        ids.append(int(drafter.logits(found[-1:])[0].argmax()))
    return ids[len(tokens) :]


def test_drafts_are_those_of_a_computation_from_scratch(drafting: ModelEngine) -> None:
    """Of rows that had drafts before, and that had none."""
    texts = begun(drafting, [KINDS[0]] * 3)
    for most in ([MOST, 0, 2], [0, MOST, 1], [MOST] * 3):
        add(texts, decode(drafting, [0, 1, 2], most), [0, 1, 2])
        verification = drafting.verification
        assert isinstance(verification, Verification)
        known = [prompt + text.tokens for prompt, text in zip(PROMPTS, texts, strict=True)]
        rows, lens = np.arange(3, dtype=np.int32), np.array(list(map(len, known)), np.int64)
        drafts = verification._drafter.propose(rows, lens, np.array([MOST, MOST, 2], np.int32))
        assert drafts.counts.tolist() == [MOST, MOST, 2]
        expected = [from_scratch(drafting, *both) for both in zip(known, drafts.counts.tolist(), strict=True)]
        assert [drafts.tokens[nth, : len(wanted)].tolist() for nth, wanted in enumerate(expected)] == expected


@pytest.mark.parametrize("chunks", [(1, 1, 1, 22), (2, 23), (24, 1)])
def test_chunks_of_a_prompt_make_no_difference(drafting: ModelEngine, chunks: tuple[int, ...]) -> None:
    """Nor do chunks of fewer tokens than there are layers."""
    drafting.reset()
    prompt, start, text = PROMPTS[1], 0, list[int]()
    news = [row_of(drafting, 1, prompt, len(prompt), KINDS[0])]
    for count in chunks:
        start += count
        text = tokens_of(step(drafting, [(1, start - count, count, start == len(prompt))], news))
        news = []
    verification, known = drafting.verification, prompt + text
    assert isinstance(verification, Verification)
    drafts = verification._drafter.propose(np.array([1], np.int32), np.array([26]), np.array([MOST], np.int32))
    assert drafts.tokens[0].tolist() == from_scratch(drafting, known, MOST)


def test_a_row_of_which_nothing_is_computed_has_no_drafts(drafting: ModelEngine) -> None:
    """All its blocks but the last token came from the prefix cache."""
    texts = begun(drafting, [KINDS[0]] * 3)
    known = PROMPTS[2] + texts[2].tokens
    again = row_of(drafting, 2, known, len(PROMPTS[2]), KINDS[0])
    result = verify(drafting, [(2, len(known) - 1, 1)], [MOST], (again,))
    assert np.frombuffer(result.drafted, np.int32).tolist() == [0]
    assert len(tokens_of(result)) == 1
    assert np.frombuffer(decode(drafting, [2], [MOST]).drafted, np.int32).tolist() == [MOST]


def test_behind_a_sleep_it_drafts_as_before(drafting: ModelEngine) -> None:
    expected = plain(drafting, KINDS, TOKENS)
    drafting.be_without(("weights", "kv_cache"))
    drafting.be_without(())
    texts = begun(drafting, KINDS)
    add(texts, decode(drafting, [0, 1, 2], [MOST] * 3), [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[: len(text.tokens)]


def test_weights_are_read_again_for_the_drafter_too(tmp_path: Path) -> None:
    values = settings_of(tmp_path, *CASES["eagle3"])
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    made = make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)
    assert made.draft_model is not None
    weights = {name: weight.data for name, weight in made.draft_model.named_parameters() if name != "d2t"}
    before = {name: weight.clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.zero_()
    assert reload.why_not(made, made.resolved) == ""
    assert not any(bool(weight.any()) for weight in weights.values())
    reload.load(made, made.resolved)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("model", "drafter", "said"),
    [
        (V3 | {"num_nextn_predict_layers": 0}, {}, "method mtp: num_nextn_predict_layers: .* DeepseekV3ForCausalLM has none"),
        (MODEL, {}, "method mtp: Qwen3ForCausalLM has no layers that draft"),
        (QWEN | {"vocab_size": 200}, EAGLE3, "drafter: it is for a vocabulary of 211 tokens, and Qwen3ForCausalLM has .* 200 tokens"),
        (QWEN | {"hidden_size": 96}, EAGLE3, "drafter: it is for states of 48 numbers, and Qwen3ForCausalLM has states of 96 numbers"),
        (QWEN, MODEL, "drafter: Qwen3ForCausalLM reads no states of another model"),
    ],
)  # fmt: skip
def test_what_cannot_draft_is_refused_by_name(
    model: dict[str, Any], drafter: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"^--speculative-config: (model \S*)?{said}$") as raised:
        resolve.resolve(flags.build(settings_of(tmp_path, model, drafter), None))
    assert "\n" not in str(raised.value)


def test_layers_with_experts_do_not_draft_for_ranks_that_share_experts(tmp_path: Path) -> None:
    values = settings_of(tmp_path, GLM, {}, data_parallel_size=2, enable_expert_parallel=True)
    said = "experts of Glm4MoeForCausalLMNextN would have to be asked of other ranks; use ngram or suffix"
    with pytest.raises(UsageError, match=f"^--speculative-config: method mtp: {said}$"):
        resolve.resolve(flags.build(values, None))
    assert resolve.resolve(flags.build(values | {"enable_expert_parallel": False}, None)).lockstep is False


def test_a_drafter_is_no_model_to_serve(tmp_path: Path) -> None:
    config = EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"]}
    values = settings_of(tmp_path, config, {}, speculative_config="")
    with pytest.raises(
        UsageError, match="LlamaForCausalLMEagle3 drafts for another; it is a model of --speculative-conf"
    ):
        resolve.resolve(flags.build(values, None))
    values = settings_of(tmp_path, QWEN, config, speculative_config="")
    asked = json.dumps({"model": str(tmp_path / "drafter"), "num_speculative_tokens": 2})
    with pytest.raises(UsageError, match="LlamaForCausalLMEagle3 drafts from a model's states; method eagle3 is its"):
        resolve.resolve(flags.build(values | {"speculative_config": asked}, None))


@pytest.mark.parametrize(("asked", "notes"), [("", 1), ('{"method": "deepseek_mtp", "num_speculative_tokens": 2}', 0)])
def test_layers_that_are_not_loaded_are_named(
    asked: str, notes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve.resolve(flags.build(settings_of(tmp_path, V3, {}, speculative_config=asked), None)).resolved
    assert found is not None
    assert (found.drafter is None) == bool(notes)
    assert capsys.readouterr().err.count("the layers that draft further tokens are not loaded") == notes
