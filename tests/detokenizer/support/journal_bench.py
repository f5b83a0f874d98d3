"""A detokenizer of letters with a check after every event: shared by the tests of its journal."""

from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer, models

from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event
from meshlm.protocol.edges.admit import Admit, Routed
from meshlm.protocol.edges.text import Abort, Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.edges.token import Ended, First, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send

F0, F1 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)
S0, S1 = Identity(Role.SCHEDULER), Identity(Role.SCHEDULER, 1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TABLE = TokenTable(
    LoadedTokenizer(
        Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, "a")), {}, frozenset(), True
    )
)


def token_ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


class Bench:
    """A detokenizer whose coordinator is there, and a check after every event."""

    def __init__(self, coordinator: int = 1) -> None:
        self.core = Detokenizer(TABLE, len(LETTERS), 100)
        self.now = 0.0
        if coordinator:
            self.up(COORDINATOR, coordinator)

    def event(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def says(self, sender: Identity, message: object, life: int = 1) -> list[Effect]:
        return self.event(Received(sender, Incarnation(life), message))  # type: ignore[arg-type]

    def up(self, identity: Identity, life: int = 1) -> list[Effect]:
        return self.event(PeerUp(identity, Incarnation(life)))

    def lost(self, identity: Identity, life: int = 1) -> list[Effect]:
        return self.event(PeerLost(identity, Incarnation(life)))

    def submit(self, name: str = "r", prompt: str = "hi", max_tokens: int = 9, **text: object) -> list[Effect]:
        """One request of frontend F0, encoded."""
        submit = Submit(
            (Handle(len(name)),),
            (RequestId(name),),
            TokenPrompt(pack_i32(token_ids(prompt))),
            SamplingParams(),
            TextParams(**text),  # type: ignore[arg-type]
            max_tokens,
        )
        (encode,) = self.says(F0, submit)
        assert isinstance(encode, Encode)
        _, *effects = self.event(Encoded(encode.job, array("i", token_ids(prompt))))
        return effects

    def routed(self, request: Admit, scheduler: Identity = S0, life: int = 1) -> list[Effect]:
        return self.says(COORDINATOR, Routed(request.work.handle, scheduler, Incarnation(life)))

    def tokens(
        self,
        request: Admit,
        start: int,
        text: str,
        scheduler: Identity = S0,
        end: FinishReason | None = None,
        life: int = 1,
    ) -> list[Effect]:
        """The scheduler's news; an attempt's first tokens say how much of the prompt was cached."""
        ids, first = pack_i32(token_ids(text)), start == len(request.work.output_token_ids) // 4
        ended = [] if end is None else [Ended(0, end)]
        begun = {0: First(0)} if first else {}
        handle, counts = pack_i32([request.work.handle]), pack_i32([len(text)])
        deltas = TokenDeltas(handle, pack_i32([start]), counts, ids, ended, first=begun)
        return self.says(scheduler, deltas, life)

    def abort(self, name: str) -> list[Effect]:
        return self.says(F0, Abort((RequestId(name),)))

    def news(self) -> list[tuple[Identity, int, int, str, FinishReason | None]]:
        """What frontends are told: to, handle, start, text, end."""
        found = []
        for send in self.core.journal.batches():
            batch = send.message
            assert isinstance(batch, TextDeltas)
            ends = {end.row: end.reason for end in batch.finished}
            for row, (handle, start) in enumerate(zip(ints(batch.handles), ints(batch.starts), strict=True)):
                found.append((send.to, handle, start, batch.texts[row], ends.get(row)))
        return found


def admits(effects: Sequence[Effect]) -> list[Admit]:
    """All effects are Admits."""
    found = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == COORDINATOR]
    assert len(found) == len(effects)
    return [message for message in found if isinstance(message, Admit)]


def admitted(effects: Sequence[Effect]) -> Admit:
    (found,) = admits(effects)
    return found
