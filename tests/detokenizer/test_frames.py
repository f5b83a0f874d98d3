"""Frames of a token for each request: they give what rows of any number give; cut characters, stop strings, pile-ups."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer, models

from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event
from meshlm.protocol.edges.text import Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.edges.token import Ended, First, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, byte_alphabet
from meshlm.runtime.process.events import PeerUp, Received

FRONTENDS = [Identity(Role.FRONTEND, index) for index in range(2)]
SCHEDULER, LIFE = Identity(Role.SCHEDULER), Incarnation(1)
PIECES = [b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:], "é".encode()]
_LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}
_VOCABULARY = {"".join(_LETTERS[byte] for byte in piece): index for index, piece in enumerate(PIECES)}
TABLE = TokenTable(LoadedTokenizer(Tokenizer(models.WordLevel(_VOCABULARY, "a")), {}, frozenset(), True))
NUM_STREAMS = 4


class Bench:
    """Four requests of two frontends, two of them with a stop string; a check after every event."""

    def __init__(self) -> None:
        self.core = Detokenizer(TABLE, len(PIECES), 1000)
        self.event(PeerUp(COORDINATOR, LIFE))
        self.texts = [""] * NUM_STREAMS
        self.ends: dict[int, int] = {}
        for number in range(NUM_STREAMS):
            name, text = RequestId(f"r{number}"), TextParams(stop=("cab",) if number % 2 else ())
            prompt = TokenPrompt(pack_i32([0]))
            submit = Submit((Handle(number),), (name,), prompt, SamplingParams(min_tokens=number), text, 500)
            (encode,) = self.event(Received(FRONTENDS[number // 2], LIFE, submit))
            assert isinstance(encode, Encode)
            self.event(Encoded(encode.job, array("i", [0])))
        self.requests = list(self.core.journal.by_handle.values())
        self.told = 0

    def event(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, 0.0)
        self.core.check()
        return effects

    def step(self, tokens: list[int]) -> None:
        """The next token of each request that has not ended."""
        live = [number for number in range(NUM_STREAMS) if self.requests[number].handle in self.core.journal.by_handle]
        handles = pack_i32(self.requests[number].handle for number in live)
        ids = pack_i32(tokens[number] for number in live)
        starts = pack_i32([self.told] * len(live))
        self.told += 1
        if live:
            self.event(Received(SCHEDULER, LIFE, TokenDeltas(handles, starts, b"", ids)))

    def flush(self) -> None:
        for send in self.core.journal.batches():
            batch = send.message
            assert isinstance(batch, TextDeltas)
            handles = ints(batch.handles)
            for handle, text in zip(handles, batch.texts, strict=True):
                self.texts[handle] += text
            assert sum(ints(batch.counts) or [1] * len(handles)) == len(ints(batch.token_ids))
            self.ends.update({handles[end.row]: end.num_output_tokens for end in batch.finished})


def test_tokens_that_pile_up_share_a_row() -> None:
    bench = Bench()
    for _ in range(3):
        bench.step([0, 1, 1, 0])
    bench.flush()
    for _ in range(3):
        bench.step([0, 1, 2, 5])
    (first, second) = (send.message for send in bench.core.journal.batches())
    assert isinstance(first, TextDeltas)
    assert isinstance(second, TextDeltas)
    assert (first.texts, ints(first.counts), ints(first.token_ids)) == (["aaa", "bbb"], [3, 3], [0] * 3 + [1] * 3)
    assert (second.texts, ints(second.starts)) == (["ccc", "ééé"], [3, 3])


rows = st.lists(
    st.tuples(
        st.integers(0, NUM_STREAMS),  # the last one is nobody's
        st.integers(-1, 1),  # of the request's next token: one that came before, it, one behind a gap
        st.integers(0, len(PIECES) - 1),
        st.sampled_from(["", "", "", "first", "end"]),
    ),
    min_size=1,
    max_size=NUM_STREAMS,
    unique_by=lambda row: row[0],
)


@given(st.lists(rows, max_size=12))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_frame_of_a_token_each_gives_what_rows_of_any_number_give(
    story: list[list[tuple[int, int, int, str]]],
) -> None:
    lean, general = Bench(), Bench()
    for frame in story:
        requests = [lean.requests[number] if number < NUM_STREAMS else None for number, *_ in frame]
        deltas = TokenDeltas(
            pack_i32(request.handle if request else 99 for request in requests),
            pack_i32(
                max(0, len(s.output_token_ids) + off) if s else 0
                for s, (_, off, _, _) in zip(requests, frame, strict=True)
            ),
            b"",
            pack_i32(token for _, _, token, _ in frame),
            ended=[Ended(row, FinishReason.LENGTH) for row, (*_, kind) in enumerate(frame) if kind == "end"],
            first={row: First(0) for row, (*_, kind) in enumerate(frame) if kind == "first"},
        )
        counted = replace(deltas, counts=pack_i32([1] * len(frame)))
        effects = lean.event(Received(SCHEDULER, LIFE, deltas))
        assert effects == general.event(Received(SCHEDULER, LIFE, counted))
        assert [request.output_token_ids for request in lean.requests] == [
            request.output_token_ids for request in general.requests
        ]
    lean.flush()
    general.flush()
    assert (lean.texts, lean.ends) == (general.texts, general.ends)
