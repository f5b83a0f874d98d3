"""The fake device says what the KV contents say, and notices a wrong block table."""

import msgspec
from tiny_models import resolved_of, spec_of

from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.config import CacheConfig, MeshConfig
from meshlm.protocol.ids import Row, StepId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.workers.fake import FakeEngine, expected_token

VOCAB = 1000
SPEC = spec_of(vocab_size=VOCAB, hidden_size=4, head_dim=4, max_position_embeddings=256)


def engine() -> FakeEngine:
    resolved = resolved_of(SPEC, device="fake")
    config = MeshConfig(cache=CacheConfig(block_size=8), resolved=resolved)
    return FakeEngine(config, lambda *news: None)


def new(row: int, tokens: list[int], blocks: list[int]) -> NewRow:
    return NewRow(Row(row), pack_i32(tokens), len(tokens), pack_i32(blocks), SamplingParams())


def plan(rows: list[int], starts: list[int], counts: list[int], new_rows: list[NewRow]) -> StepPlan:
    columns = (pack_i32(rows), pack_i32(starts), pack_i32(counts))
    return StepPlan(1, StepId(1), *columns, samples=b"", num_tokens=sum(counts), new_rows=new_rows)


def run(fake: FakeEngine, one: StepPlan) -> list[int]:
    return ints(fake.step(one, 0).wait().token_ids)


def test_prompt_in_chunks_and_decode() -> None:
    fake, tokens = engine(), list(range(20, 40))
    run(fake, msgspec.structs.replace(plan([0], [0], [9], [new(0, tokens, [5, 2, 7])]), samples=b"\x00"))
    first = run(fake, plan([0], [9], [11], []))
    assert first == [expected_token(tokens, VOCAB)]
    assert run(fake, plan([0], [20], [1], [])) == [expected_token([*tokens, *first], VOCAB)]


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
