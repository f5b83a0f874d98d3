"""The fake device says what the KV contents say, and notices a wrong block table."""

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from byte_vocabulary import EOS, byte_vocabulary, of_regex
from fake_oracle import expected_token, expected_vector
from fake_steps import SPEC, VOCAB, new, plan, run
from llguidance import LLMatcher
from tiny_models import resolved_of

from meshlm.protocol.config import CacheConfig, MeshConfig, WorkerConfig
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import StepId
from meshlm.workers.fake.engine import FakeEngine
from meshlm.workers.fake.tokens import tokens_of_media
from meshlm.workers.output.grammars import GrammarRows, Grammars
from meshlm.workers.output.matchers import Matchers


def engine(drafts: int = 0, **changes: Any) -> FakeEngine:
    resolved = resolved_of(SPEC, device="fake", **changes)
    worker = WorkerConfig(fake_drafts=drafts)
    config = MeshConfig(cache=CacheConfig(block_size=8), worker=worker, resolved=resolved)
    return FakeEngine(config, lambda *news: None)


def test_prompt_in_chunks_and_decode() -> None:
    fake, tokens = engine(), list(range(20, 40))
    run(fake, msgspec.structs.replace(plan([0], [0], [9], [new(0, tokens, [5, 2, 7])]), samples=b"\x00"))
    first = run(fake, plan([0], [9], [11], []))
    assert first == [expected_token(tokens, VOCAB)]
    assert run(fake, plan([0], [20], [1], [])) == [expected_token([*tokens, *first], VOCAB)]


def test_images_decide_tokens() -> None:
    """Each place of each image, and nothing of the placeholders' own ids."""
    tokens = list(range(20, 32))
    found = []
    for digest in (b"a" * 32, b"b" * 32):
        item = MediaItem(Modality.IMAGE, digest, pack_i32([3] * 6), bytes([0, 1, 1, 1, 1, 0]), position=4)
        asks = msgspec.structs.replace(new(0, tokens, [5, 2]), extras=(Media((item,)),))
        found.append(run(engine(), plan([0], [0], [12], [asks])))
        seen = [*tokens[:5], *tokens_of_media(item, VOCAB), *tokens[9:]]
        assert found[-1] == [expected_token(seen, VOCAB)]
    assert found[0] != found[1]


def test_log_probabilities() -> None:
    """Of the sampled token and of a prompt's, wherever its chunks end."""
    fake, tokens = engine(), list(range(20, 40))
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    asks = msgspec.structs.replace(new(0, tokens, [5, 2, 7]), sampling=params)
    first = fake.step(msgspec.structs.replace(plan([0], [0], [9], [asks]), samples=b"\x00"), 0).wait()
    last = fake.step(plan([0], [9], [11], []), 0).wait()
    assert not first.logprobs
    assert ints(first.prompt_logprobs[0].top_ids) + ints(last.prompt_logprobs[0].top_ids) == tokens[1:]
    (token,) = ints(last.token_ids)
    assert last.logprobs[0].width == 2
    assert ints(last.logprobs[0].top_ids) == [token, (token + 1) % VOCAB]
    after = fake.step(plan([0], [20], [1], []), 0).wait()
    assert list(after.logprobs) == [0]
    assert not after.prompt_logprobs


def test_a_prefix_computed_in_the_same_step_may_be_shared() -> None:
    tokens = list(range(20, 29))
    owner, sharer = new(0, tokens, [5, 2]), new(1, tokens, [5, 3])
    got = run(engine(), plan([1, 0], [8, 0], [1, 9], [owner, sharer]))
    assert got == [expected_token(tokens, VOCAB)] * 2


def test_a_wrong_table_is_a_wrong_token() -> None:
    fake, tokens = engine(), list(range(20, 29))
    run(fake, plan([0], [0], [9], [new(0, tokens, [5, 2])]))
    wrong = new(1, [*tokens, 1], [6, 2])
    assert run(fake, plan([1], [9], [1], [wrong])) == [expected_token([*tokens, 1], VOCAB)]  # its last slot is right
    wrong = new(2, [*tokens, 1], [5, 6])
    assert run(fake, plan([2], [9], [1], [wrong])) != [expected_token([*tokens, 1], VOCAB)]


# --- several tokens in one step ---


def drafting(rows: list[int], starts: list[int], drafts: list[int], step: int, new_rows: list[NewRow]) -> StepPlan:
    counts = [1] * len(rows)
    num_tokens = len(rows) + sum(drafts)
    first = plan(rows, starts, counts, new_rows)
    return msgspec.structs.replace(first, step=StepId(step), num_drafts=pack_i32(drafts), num_tokens=num_tokens)


def decoded(fake: FakeEngine, tokens: list[int], length: int, drafts: int) -> tuple[list[int], list[int]]:
    """Row 0 decoded to `length` tokens; and how many each step gave. Each plan says the most that the row can be."""
    found, given = run(fake, plan([0], [0], [len(tokens)], [new(0, tokens, [5, 2, 7, 1, 0, 3, 8])])), [1]
    step, most, fewer = 1, len(tokens) + 1, 0
    while len(tokens) + len(found) < length:
        step += 1
        allowed = min(drafts, length - len(tokens) - len(found) - 1)
        result = fake.step(drafting([0], [min(most, length) - 1], [allowed], step, []), 0).wait()
        most += 1 + allowed
        (drafted,) = ints(result.drafted)
        fewer += drafted < allowed
        assert ints(result.counts)[0] - 1 <= drafted <= allowed
        found += ints(result.token_ids)
        given += ints(result.counts)
    assert fewer or not drafts
    return found, given


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    tokens = list(range(20, 29))
    found, given = decoded(engine(drafts=3), tokens, 50, 3)
    assert len(found) == 41
    for place in range(41):
        assert found[place] == expected_token(tokens + found[:place], VOCAB)
    assert {0, 1, 2, 4} <= set(given)
    assert len(given) < 30


def test_log_probabilities_of_several_tokens() -> None:
    fake, tokens = engine(drafts=3), list(range(20, 29))
    asks = msgspec.structs.replace(new(0, tokens, [5, 2, 7, 1]), sampling=SamplingParams(logprobs=1))
    run(fake, plan([0], [0], [9], [asks]))
    sizes = set()
    for step in range(2, 8):
        result = fake.step(drafting([0], [9 + 4 * step], [2], step, []), 0).wait()
        (count,) = ints(result.counts)
        sizes.add(count)
        assert ints(result.token_ids) == ints(result.logprobs[0].top_ids)[:: result.logprobs[0].width or 1]
        assert len(ints(result.logprobs[0].ranks)) == count
    assert len(sizes) > 1


def test_a_wrong_block_shows_behind_drafts_too() -> None:
    tokens = list(range(20, 29))
    for wrong in (False, True):
        fake = engine(drafts=3)
        first, _ = run(fake, plan([0, 1], [0, 0], [9, 9], [new(0, tokens, [5, 2, 7]), new(1, [1] * 9, [6, 3, 4])]))
        if wrong:
            fake._rows.blocks[:, 0, 1] = 3  # of the row's last tokens: they are another row's
        found = run(fake, drafting([0], [9], [3], 3, []))
        assert found
        assert (found[0] == expected_token([*tokens, first], VOCAB)) is not wrong


# --- vectors ---


@pytest.mark.parametrize("kind", PoolKind)
def test_a_vector_of_a_prompt_in_chunks(kind: PoolKind) -> None:
    fake, tokens = engine(), list(range(20, 40))
    assert fake.facts.pool_kinds == tuple(PoolKind)
    asks = msgspec.structs.replace(new(0, tokens, [5, 2, 7]), extras=(Pool(kind),))
    for _ in range(2):  # the row's second tenant finds nothing of the first one's
        first = fake.step(msgspec.structs.replace(plan([0], [0], [9], [asks]), samples=b"\x00"), 0).wait()
        assert not first.pooled
        last = fake.step(msgspec.structs.replace(plan([0], [9], [11], []), samples=b"\x00"), 0).wait()
        assert last.token_ids == b""
        assert np.frombuffer(last.pooled[0], np.float32).tolist() == expected_vector(tokens, kind)
        assert len(last.pooled[0]) == fake.facts.pooled_bytes * (len(tokens) if kind is PoolKind.ALL else 1)


def test_a_wrong_table_is_a_wrong_vector() -> None:
    fake, tokens = engine(), list(range(20, 29))
    run(fake, plan([0], [0], [8], [new(0, tokens[:8], [5])]))
    for block, right in ((5, True), (6, False)):
        asks = msgspec.structs.replace(new(1, tokens, [block, 2]), extras=(Pool(PoolKind.LAST),))
        result = fake.step(msgspec.structs.replace(plan([1], [8], [1], [asks]), samples=b"\x00"), 0).wait()
        found = np.frombuffer(result.pooled[0], np.float32).tolist()
        assert (found == expected_vector(tokens, PoolKind.LAST)) is right


def compiled(text: str, **more: Any) -> Grammar:
    return Grammar(GrammarKind.COMPILED, text, "field", **more)


DIGITS = of_regex("[0-9]{4}").text
LIST = json.dumps(
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 3, "x-guidance": {"whitespace_flexible": False}}
)
FORMS: list[tuple[Grammar, dict[str, Any], str]] = [
    (of_regex("[a-d]{3}[0-9]{3}"), {}, "[a-d]{3}[0-9]{3}"),
    (compiled(LLMatcher.grammar_from_json_schema(LIST)), {}, r"\[(\"x\"|1|null)(,(\"x\"|1|null)){2,}\]"),
    (compiled(LLMatcher.grammar_from_lark('start: "yes" | "no, thanks" | "yes, please"')), {}, "yes|no, thanks|yes, please"),
    (compiled(DIGITS, begins_after="a0"), {"allowed_token_ids": (*b"a01",)}, "[a01]*?a0[01]{4}"),
    (compiled(DIGITS, begins_after="</t>", thinking=ThinkingBudget(3, "</t>")), {}, "</t>[0-9]{4}"),
    (compiled("", thinking=ThinkingBudget(2, "</t>")), {"allowed_token_ids": (*b"ab",)}, "[ab]{2}</t>[ab]*"),
]  # fmt: skip


def written(drafts: int) -> tuple[list[list[int]], list[list[int]]]:
    """The outputs of rows that keep to FORMS, beside one that keeps to none, and how many tokens each got in each step."""
    fake, num_rows, length = engine(drafts, max_num_seqs=8, max_num_batched_tokens=256), 1 + len(FORMS), 48
    fake.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    prompts = [list(range(20 + row, 29 + row)) for row in range(num_rows)]
    rows = [new(row, prompt, [*range(1 + 8 * row, 9 + 8 * row)]) for row, prompt in enumerate(prompts)]
    for nth, (grammar, params, _) in enumerate(FORMS, 1):
        sampling = SamplingParams(eos_token_ids=(EOS,), **params)
        rows[nth] = msgspec.structs.replace(rows[nth], sampling=sampling, extras=(grammar,))
    found, given = (
        [[token] for token in run(fake, plan([*range(num_rows)], [0] * num_rows, [9] * num_rows, rows))],
        [[1]] * num_rows,
    )
    for step in range(2, 200):
        left = [max(0, min(drafts, length - len(each) - 1)) for each in found]
        going = [row for row in range(num_rows) if len(found[row]) < length]
        if not going:
            break
        starts, most = [8 + len(found[row]) for row in going], [left[row] for row in going]
        result = fake.step(
            drafting(going, starts, most, step, []) if drafts else plan(going, starts, [1] * len(going), []), 0
        ).wait()
        assert not result.failed
        tokens, counts = ints(result.token_ids), ints(result.counts) or [1] * len(going)
        for row, count in zip(going, counts, strict=True):
            found[row], tokens, given[row] = found[row] + tokens[:count], tokens[count:], [*given[row], count]
    return found, given


def test_rows_with_a_grammar_get_the_same_text_with_drafts() -> None:
    """They are constrained here too; the others say what their KV contents say. Drafts go through the end of reasoning, of a budget and
    of the text."""
    plain, _ = written(0)
    found, given = written(3)
    assert found == plain
    prompt = list(range(20, 29))
    assert plain[0] == [expected_token([*prompt, *plain[0][:nth]], VOCAB) for nth in range(48)]
    for output, counts, (_, _, form) in zip(found[1:], given[1:], FORMS, strict=True):
        text = bytes(token for token in (output[: output.index(EOS)] if EOS in output else output) if token < 256)
        assert re.fullmatch(form, text.decode())
        assert {0, 1, 2, 4} <= set(counts)


def test_a_row_with_a_grammar_to_which_nothing_is_left_fails_alone() -> None:
    fake = engine()
    fake.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    prompt = list(range(20, 29))
    plain, failing = new(0, prompt, [*range(1, 9)]), new(1, prompt, [*range(9, 17)])
    params = SamplingParams(eos_token_ids=(EOS,), allowed_token_ids=(7,))
    failing = msgspec.structs.replace(failing, sampling=params, extras=(of_regex("abc"),))
    result = fake.step(plan([0, 1], [0, 0], [9, 9], [plain, failing]), 0).wait()
    assert ints(result.token_ids)[0] == expected_token(prompt, VOCAB)
    assert "no token is left" in result.failed[1].message
