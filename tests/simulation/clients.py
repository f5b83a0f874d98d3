"""What clients ask, what they get, and what they should have got. The frontend is the real one without its HTTP server."""

from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from mock_worker import VOCAB, next_token, reference, state_of
from msgspec import Struct
from network import running
from rolling_hash import pooled_reference
from tokenizers import Tokenizer, decoders, models

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.stops import StopFinder
from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.io import FrontendApp
from meshlm.protocol.edges.text import Accepted, Retry, Submit, TextParams, TokenPrompt
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Identity, RequestId, Role
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, byte_alphabet
from meshlm.scheduler_proc.limits import MAX_CRASHES


def _tokenizer() -> LoadedTokenizer:
    """Words of two letters; some tokens are but a byte of a character."""
    letters = {value: key for key, value in byte_alphabet().items()}
    words = [bytes([97 + token % 26, 97 + token // 26]) for token in range(VOCAB)]
    for number, byte in enumerate("é€😀".encode()):
        words[10 * number] = bytes([byte])
    vocab = {"".join(letters[byte] for byte in word): token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return LoadedTokenizer(tokenizer, {}, frozenset(), True)


MOST_UPDATES = 8  # of a history
LOADED = _tokenizer()
TABLE = TokenTable(LOADED)


class Ask(Struct, frozen=True, kw_only=True):
    """One HTTP request to come."""

    number: int
    at_s: float
    frontend: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int = 1
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    retries: bool = False  # with an Idempotency-Key: asks again when its frontend dies, wherever one is
    leave_after: int = -1  # tokens after which the client hangs up; -1: it stays
    pool: PoolKind | None = None  # it wants a vector


class Answer(NamedTuple):
    """What an undisturbed run gives."""

    tokens: list[int]
    text: str
    reason: FinishReason
    vector: bytes = b""


@lru_cache(maxsize=10_000)
def expected(ask: Ask) -> Answer:
    if ask.pool is not None:
        return Answer([], "", FinishReason.STOP, pooled_reference(ask.prompt, ask.pool))
    decoder = TABLE.decoder(True)
    finder = StopFinder(ask.stops, ask.include_stop) if ask.stops else None
    tokens: list[int] = []
    text = ""
    reason = FinishReason.LENGTH
    for token in reference(ask.prompt, ask.max_tokens):
        tokens.append(token)
        if token not in ask.stop_ids or ask.include_stop:
            piece = decoder.push(token)
            text += finder.push(piece) if finder else piece
        if finder and finder.matched is not None:
            return Answer(tokens, text, FinishReason.STOP)
        if token in ask.stop_ids:
            reason = FinishReason.STOP
            break
    rest = decoder.finish()
    if finder is None:
        return Answer(tokens, text + rest, reason)
    text += finder.push(rest)
    if finder.matched is not None:
        return Answer(tokens, text, FinishReason.STOP)
    return Answer(tokens, text + finder.finish(), reason)


def explained(prompt: tuple[int, ...], tokens: list[int]) -> bool:
    """Whether each token is what KV of one version of the weights gives, none older than that of the token before."""
    number, known = 0, list(prompt)
    for token in tokens:
        while next_token(state_of(known, number)) != token:
            number += 1
            if number > MOST_UPDATES:
                return False
        known.append(token)
    return True


@dataclass
class Got:
    """What one choice got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: FinishReason | None = None


class Client:
    """A ResponseSink that compares every token with what it should be."""

    def __init__(self, ask: Ask, *, weights_change: bool = False) -> None:
        self.ask, self.expected, self.weights_change = ask, expected(ask), weights_change
        self.got = [Got() for _ in range(ask.num_choices)]
        self.choices: list[Choice] = []
        self.has_begun = False
        self.frontend: Frontend | None = None
        self.left = False  # hung up, or its frontend died
        self.asked = False
        self.num_retries = 0

    @property
    def done(self) -> bool:
        return self.left or (self.asked and all(got.end is not None for got in self.got))

    def open(self, frontend: "Frontend") -> None:
        ask, self.asked, self.frontend = self.ask, True, frontend
        frontend.num_submits += 1
        life = "again" if ask.retries else frontend.life
        names = tuple(RequestId(f"r{ask.number}.{choice}-{life}") for choice in range(ask.num_choices))
        # As with Last-Event-ID: what it had goes on, and what comes before is left out.
        cuts = tuple(len(got.tokens) for got in self.got)
        self.choices, self.has_begun = [], False
        submit = Submit(
            tuple(frontend.client.new_handle() for _ in names),
            names,
            TokenPrompt(pack_i32(ask.prompt)),
            SamplingParams(temperature=0.0, stop_token_ids=ask.stop_ids),
            TextParams(stop=ask.stops, include_stop_str_in_output=ask.include_stop),
            max_tokens=ask.max_tokens,
            arrival_s=running().world.now,
            retry=Retry(f"{ask.number:08x}", b"", cuts) if ask.retries else None,
            extras=() if ask.pool is None else (Pool(ask.pool),),
        )
        for index, (handle, name) in enumerate(zip(submit.handles, names, strict=True)):
            mark = Retry(f"{ask.number:08x}", b"", (cuts[index],)) if ask.retries else None
            own = msgspec.structs.replace(submit, handles=(handle,), request_ids=(name,), retry=mark)
            self.choices.append(Choice(self, index, 0, own, handle))
        frontend.requests.open(self.choices, submit)
        if ask.leave_after == 0:
            self._leave_soon()

    def again(self) -> bool:
        """Its frontend died: whether it asks another one, instead of giving up."""
        if not self.ask.retries or self.done:
            self.left = True
        else:
            self.num_retries += 1
            self.asked, self.frontend = False, None
        return not self.left

    def _leave_soon(self) -> None:
        process = running()
        process.loop.call_later(process.dice.random() ** 3 * 0.01, self._leave)

    def _leave(self) -> None:
        if not self.done and self.frontend is not None:
            self.left = True
            self.frontend.requests.close(self.choices)

    # --- ResponseSink ---

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        assert accepted.num_prompt_tokens == len(self.ask.prompt)

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        self.text(choice, choice.token_ids[len(choice.token_ids) - num_tokens :].tolist(), text)
        finished = details.finished if details is not None else None
        if finished is None or self.got[choice.index].end is not None:
            return
        got, wanted, name = self.got[choice.index], self.expected, choice.submit.request_ids[0]
        got.end = finished.reason
        if finished.kind is ErrorKind.POISON:
            deaths = running().world.num_deaths[Role.WORKER]
            assert deaths >= MAX_CRASHES, f"{name} is blamed for {deaths} deaths: {finished.message}"
            return  # alone in its worker whenever that was killed: as if it had done it
        assert got.end is not FinishReason.ERROR, f"{name} ended with an error: {finished.message}"
        if self.weights_change:
            assert len(got.tokens) == len(wanted.tokens), f"{name} got {len(got.tokens)} tokens"
            return
        assert got.tokens == wanted.tokens, f"{name} got {got.tokens} instead of {wanted.tokens}"
        assert got.text == wanted.text, f"{name} got {got.text!r} instead of {wanted.text!r}"
        assert got.end is wanted.reason, f"{name} ended with {got.end} instead of {wanted.reason}"
        assert finished.num_output_tokens == len(got.tokens)
        assert choice.pooled == wanted.vector, f"{name} got the vector {choice.pooled!r} instead of {wanted.vector!r}"

    def text(self, choice: Choice, new: list[int], text: str) -> None:
        got, name = self.got[choice.index], choice.submit.request_ids[0]
        assert not self.left, f"{name} has news although its client left"
        assert choice in self.choices, f"{name} has news on an earlier connection"
        have, passed = len(got.tokens), len(choice.token_ids)
        if self.num_retries and (got.end is not None or (passed <= have and new)):
            return  # it has that event
        assert got.end is None, f"{name} has news after its end"
        assert passed == have + len(new), f"{name}: a row of {len(new)} to {passed} does not begin at {have}"
        got.tokens += new
        if self.weights_change:
            assert explained(self.ask.prompt, got.tokens), f"{name}: {got.tokens} are of mixed weights"
        else:
            assert new == self.expected.tokens[have : have + len(new)], (
                f"{name} got {new} at {have}, not {self.expected}"
            )
        got.text += text
        if have < self.ask.leave_after <= have + len(new):
            self._leave_soon()

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        name = choice.submit.request_ids[0]
        assert not self.left, f"{name} has news although its client left"
        assert self.got[choice.index].end is None, f"{name} ended twice"
        self.got[choice.index].end = FinishReason.ERROR
        raise AssertionError(f"{name} failed: {kind.value}: {message}")


class Frontend(FrontendApp):
    """Requests come from the test. Those that come while the mesh does not serve wait, as in Backend.wait_serving."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Client] = []
        self.clients: list[Client] = []
        self.num_submits = 0
        self.life = 0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._use(mesh)
        self.life = mesh.incarnation
        nobody: Any = SimpleNamespace(
            mesh_stats=lambda stats: None,
            written=lambda message, begin_ns: None,
            flush=self.client.tracker.take_counts,  # nobody reads its metrics
            feed=Feed(self, Facts(str(mesh.identity), self.version, ""), limit=0),
        )
        self.observer = nobody
        self._tick()
        return {}

    def take(self, client: Client) -> None:
        self.clients.append(client)
        self.waiting.append(client)
        self._open_waiting()

    def _open_waiting(self) -> None:
        if self.client.mesh is None or self.readiness.not_ready_reason():
            return
        waiting, self.waiting = self.waiting, []
        for client in waiting:
            client.open(self)

    def flush(self) -> None:
        super().flush()
        self._open_waiting()


def frontend_identity(ask: Ask) -> Identity:
    return Identity(Role.FRONTEND, ask.frontend)
