"""Drafts on a GPU: rows are as long as the device alone knows, and their texts are those of plain steps but for rounding."""

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from cpu_steps import PROMPTS, tokens_of
from drafted_steps import Text, add, begun, decode, plain, row_of
from msgspec.structs import replace

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import StepId

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import MODEL, engine
from host_drafter import HostDrafter

from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.device_verification import DeviceVerification

pytestmark = pytest.mark.gpu
MOST, TOKENS = 5, 30
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
# Of logits that are all but equal a rounding changes who is among the first 40, and who is first.
LEAST = {"seeded": 0.03, "penalties": 0.3}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.6, seed=7, top_k=40, top_p=0.9),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 2.0}, bad_words_token_ids=((7,),)),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(30, 60))),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
}


class Scripted(HostDrafter):
    """Guesses what a test says, of texts that it knows; wrong in places."""

    def __init__(self, rows: DeviceRows) -> None:
        super().__init__(rows, self.guesses)
        self.texts: dict[int, list[int]] = {}  # by row
        self.script: Iterator[int] = cycle([MOST])  # which of the drafts is wrong

    def guesses(self, row: int, known: list[int], count: int) -> list[int]:
        wrong, ahead = next(self.script), self.texts[row][len(known) : len(known) + count]
        return [token + (at == wrong) for at, token in enumerate(ahead)]


def drafts(made: ModelEngine) -> DeviceVerification:
    assert isinstance(made.verification, DeviceVerification)
    return made.verification


@pytest.fixture(scope="module", params=["FULL", "NONE", "FULL deterministic"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    folder = tmp_path_factory.mktemp("model")
    mode, exact = request.param.split()[0], "deterministic" in request.param
    made = engine(folder, deterministic=exact, cudagraph_mode=mode, speculative_config=json.dumps(NGRAM))
    while made.idle():
        pass
    return made


def common(ours: list[int], theirs: list[int]) -> int:
    """Tokens until the first that differs."""
    differs = [one != other for one, other in zip(ours, theirs, strict=False)]
    return differs.index(True) if True in differs else len(differs)


@pytest.mark.parametrize("kinds", [("greedy", "seeded", "penalties"), ("bias", "allowed", "logprobs")])
def test_any_drafts_give_the_text_of_plain_steps(made: ModelEngine, kinds: tuple[str, ...]) -> None:
    """Rounding differs with the size of a step, so a near tie may fall the other way: then the rest differs. Not so with
    --deterministic."""
    params = [KINDS[kind] for kind in kinds]
    verification = drafts(made)
    scripted = Scripted(made.rows)
    expected = plain(made, params, TOKENS + 2 * MOST)
    scripted.texts = {
        row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))
    }
    usual, verification.drafter = verification.drafter, scripted
    same, total, steps = np.zeros(3, int), np.zeros(3, int), 0
    try:
        for seed in range(6):
            generator = np.random.default_rng(seed)
            scripted.script = iter(generator.integers(0, MOST + 2, 1000).tolist())
            texts = begun(made, params)
            while min(len(text.tokens) for text in texts) < TOKENS:
                rows = [row for row in generator.permutation(3).tolist() if len(texts[row].tokens) < TOKENS]
                add(texts, decode(made, rows, generator.integers(0, MOST + 1, len(rows)).tolist()), rows)
                steps += 1
            for nth, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
                length = min(len(text.tokens), len(wanted.tokens))
                same[nth] += common(text.tokens[:length], wanted.tokens[:length])
                total[nth] += length
                assert len(text.logprobs) in (0, len(text.tokens))
    finally:
        verification.drafter = usual
    least = np.array([1.0 if made.config.worker.deterministic else LEAST.get(kind, 0.75) for kind in kinds])
    assert (same >= least * total).all(), f"{same} of {total} tokens"
    if "allowed" not in kinds:  # whose row drafts nothing
        assert total.sum() > 1.5 * 3 * steps, "drafts are kept"


def test_steps_are_planned_before_the_last_is_known(made: ModelEngine) -> None:
    """Three at a time, whose plans say the most that rows may have; nothing waits for the device."""
    params = [KINDS["greedy"]] * 3
    expected = plain(made, params, TOKENS)
    texts, ends = begun(made, params), [len(prompt) + 1 for prompt in PROMPTS]
    order = np.arange(3, dtype=np.int32).tobytes()
    for turn in range(6):
        pending = []
        for nth in range(3):
            starts = np.array([end - 1 + nth * (1 + MOST) for end in ends], np.int32).tobytes()
            most = np.full(3, MOST, np.int32).tobytes()
            plan = StepPlan(1, StepId(3 * turn + nth + 2), order, starts, b"", b"", 3 * (1 + MOST), num_drafts=most)
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending.append(made.step(plan, 0))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for one in pending:
            add(texts, one.wait(), [0, 1, 2])
        ends = [len(prompt) + len(text.tokens) for prompt, text in zip(PROMPTS, texts, strict=True)]
        assert made.rows.columns["num_known"][:3].tolist() == ends
    same = sum(common(text.tokens, wanted.tokens) for text, wanted in zip(texts, expected, strict=True))
    assert same >= 0.7 * 3 * TOKENS


def test_a_prompt_that_repeats_itself_is_drafted_from(made: ModelEngine) -> None:
    """Greedy texts of small models repeat themselves, too: some drafts are kept, and what stands in rows is what was given."""
    params = [KINDS["greedy"]] * 3
    texts = begun(made, params)
    given = steps = 0
    while min(len(text.tokens) for text in texts) < 40:
        result = decode(made, [0, 1, 2], [MOST] * 3)
        given, steps = given + len(tokens_of(result)), steps + 1
        drafted = np.frombuffer(result.drafted, np.int32)
        counts = np.frombuffer(result.counts, np.int32)
        assert ((drafted == 0) | (drafted == MOST)).all()
        assert (counts >= 1).all()
        add(texts, result, [0, 1, 2])
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        whole = prompt + text.tokens
        assert made.rows.tokens[row, : len(whole)].tolist() == whole


def test_a_row_begins_anew_beside_others_that_draft(made: ModelEngine) -> None:
    """A mixed step: a prompt, and decodes with drafts."""
    params = [KINDS["greedy"]] * 3
    expected = plain(made, params, TOKENS)
    texts = begun(made, params)
    add(texts, decode(made, [0, 1, 2], [MOST] * 3), [0, 1, 2])
    tokens = PROMPTS[1] + texts[1].tokens
    row = row_of(made, 1, tokens, len(PROMPTS[1]), params[1])
    rows, starts, counts, most = ([0, 2, 1], [90, 90, 0], [1, 1, len(tokens)], [MOST, 3, 0])
    of_rows, of_starts, of_counts, drafted = (np.array(one, np.int32).tobytes() for one in (rows, starts, counts, most))
    removed = np.array([1], np.int32).tobytes()
    plan = StepPlan(
        1, StepId(5), of_rows, of_starts, of_counts, b"", sum(counts) + sum(most), removed_rows=removed, new_rows=[row],
        num_drafts=drafted,
    )  # fmt: skip
    add(texts, made.step(plan, 0).wait(), rows)
    for _ in range(4):
        add(texts, decode(made, rows, most), rows)
    same = [common(text.tokens, wanted.tokens) for text, wanted in zip(texts, expected, strict=True)]
    assert sum(same) >= 0.7 * sum(min(TOKENS, len(text.tokens)) for text in texts)


def test_acceptance_by_chance(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As often as was said, whatever the weights."""
    chance = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.2, 0.0, 0.0]}
    made = engine(tmp_path_factory.mktemp("model"), speculative_config=json.dumps(NGRAM | chance))
    kept = np.zeros(MOST + 1, np.int64)
    for seed in range(24):
        params = [replace(KINDS["seeded"], seed=seed + 100 * row) for row in range(3)]
        texts: list[Text] = begun(made, params)
        for _ in range(12):
            result = decode(made, [0, 1, 2], [MOST] * 3)
            kept += np.bincount(np.frombuffer(result.counts, np.int32) - 1, minlength=MOST + 1)
            add(texts, result, [0, 1, 2])
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
            whole = prompt + text.tokens
            assert made.rows.tokens[row, : len(whole)].tolist() == whole
    shares = 1 - np.cumsum(kept)[:3] / kept.sum()
    np.testing.assert_allclose(shares, (0.8, 0.5, 0.2), atol=0.06)


EAGLE3 = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 1000}
EAGLE3 |= {"model_type": "llama", "tie_word_embeddings": False, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_models_draft(method: str, mode: str, tmp_path: Path) -> None:
    """A model that drafts for itself is nearly always right; others change no text. With graphs of drafts, and without."""
    drafter, config = tmp_path / "drafter", MODEL if method == "draft_model" else MODEL | EAGLE3
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config | ({"draft_vocab_size": None} if method == "eagle" else {})))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(drafter / "tokenizer.json"))
    asked = {"method": method, "model": str(drafter), "num_speculative_tokens": MOST}
    (tmp_path / "model").mkdir()
    made = engine(tmp_path / "model", cudagraph_mode=mode, speculative_config=json.dumps(asked))
    params = [KINDS["greedy"]] * 3
    expected, same, total, steps = plain(made, params, TOKENS), 0, 0, 0
    for _ in range(3):  # shapes come again, and have graphs then
        texts = begun(made, params)
        while min(len(text.tokens) for text in texts) < TOKENS:
            rows = [row for row in (2, 0, 1) if len(texts[row].tokens) < TOKENS]
            add(texts, decode(made, rows, [MOST - row for row in rows]), rows)
            steps += 1
        for text, wanted in zip(texts, expected, strict=True):
            same, total = same + common(text.tokens, wanted.tokens), total + min(len(text.tokens), TOKENS)
    assert same >= 0.7 * total, f"{same} of {total} tokens"
    if method == "draft_model":
        assert total > 3 * 3 * steps, f"{total} tokens in {steps} steps of three rows"
