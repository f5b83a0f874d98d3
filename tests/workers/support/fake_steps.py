"""Plans for a fake engine, and the tokens that it gives."""

from tiny_models import spec_of

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.fake.engine import FakeEngine

VOCAB = 1000
SPEC = spec_of(vocab_size=VOCAB, hidden_size=4, head_dim=4, max_position_embeddings=256)


def new(row: int, tokens: list[int], blocks: list[int]) -> NewRow:
    return NewRow(Row(row), pack_i32(tokens), len(tokens), pack_i32(blocks), SamplingParams())


def plan(rows: list[int], starts: list[int], counts: list[int], new_rows: list[NewRow]) -> StepPlan:
    columns = (pack_i32(rows), pack_i32(starts), pack_i32(counts))
    return StepPlan(1, StepId(1), *columns, samples=b"", num_tokens=sum(counts), new_rows=new_rows)


def run(fake: FakeEngine, one: StepPlan) -> list[int]:
    return ints(fake.step(one, 0).wait().token_ids)
