"""Recorded sequences computed again: what is asked for, and where the tokens differ. Called by cli/replay.py; it knows no mesh.

Draws are functions of the seed and the token's index, so a sequence is a function of its prompt's ids, its parameters and the weights.
"""

import http.client
import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from meshlm.protocol.recording import RecordedSequence
from meshlm.protocol.wire.ids import FinishReason
from meshlm.supervisor import batch
from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import UsageError

Json = dict[str, Any]
COMPLETIONS, NOT_RECORDED = "/v1/completions", {"X-Meshlm-Replay": "1"}
CONCURRENT = 64  # sequences that are asked for at once
ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)  # by itself
TOLD = ("prompt_logprobs", "logprob_token_ids", "timeout", "num_speculative_tokens")  # that change no token
SAME, DIFFERS, NOT_ANSWERED, SKIPPED = "same", "different", "not answered", "not replayable"


class Difference(NamedTuple):
    """The first token that is another one. None: the sequence has ended before it."""

    num_same: int  # tokens before it
    recorded: int | None
    now: int | None
    num_after: int  # of the tokens behind it, those that differ


class _Body(Struct):
    """The fields of a completion that are looked at here."""

    model: str
    prompt: list[int]
    min_tokens: int | None = None


class Outcome(NamedTuple):
    """What became of one sequence: the kind, and words for people. Fingerprints of who computed it then, and now."""

    kind: str
    text: str
    fingerprints: tuple[str | None, str | None] = (None, None)


class Refused(Exception):
    """The server does not answer this; the text says why."""


def first_difference(recorded: Sequence[int], now: Sequence[int]) -> Difference | None:
    pairs = list(itertools.zip_longest(recorded, now))
    differing = [index for index, (one, other) in enumerate(pairs) if one != other]
    return Difference(differing[0], *pairs[differing[0]], len(differing) - 1) if differing else None


def read(path: Path, wanted: str = "") -> Iterator[RecordedSequence]:
    """The sequences of a file, or of all files of a folder; those alone with the id `wanted`. UsageError names the line at fault."""
    decode = msgspec.json.Decoder(RecordedSequence).decode
    try:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file, left in [(file, file.stat().st_size) for file in files]:  # what a replay adds is not read
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if (left := left - len(line)) < 0:
                        break
                    if not line.strip() or os.fsencode(wanted) not in line:
                        continue
                    try:
                        found = decode(line)
                        msgspec.convert(found.body, _Body)
                    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                        raise UsageError(f"{file} line {number}: no recorded request: {error}") from None
                    named = found.request_id.partition("-")[2]  # the client's own name
                    if not wanted or wanted in (found.custom_id, found.request_id, named):
                        yield found
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def asked(sequence: RecordedSequence) -> Json:
    """The body of the request that computes it again. What its client, or an error, has cut off is not computed."""
    body = {name: value for name, value in sequence.body.items() if name not in TOLD}
    if sequence.finish_reason not in ENDS:
        body["max_tokens"] = len(sequence.output_token_ids)
        body["min_tokens"] = min(body.get("min_tokens") or 0, body["max_tokens"])
    return {**body, "n": 1, "stream": False, "logprobs": 0, "return_token_ids": True}


def check_models(server: Server, models: set[str]) -> None:
    """UsageError when the server has none of that name. StartError when there is no server."""
    with server.request("GET", "/v1/models") as response:
        names = [str(card["id"]) for card in json.loads(response.read())["data"]]
    if missing := sorted(models.difference(names)):
        raise UsageError(f"recorded of the model {missing[0]!r}; {server} has {', '.join(map(repr, names))}")


class Replay:
    """Sequences for one server."""

    def __init__(self, server: Server, ended: threading.Event | None = None) -> None:
        self._server, self._ended = server, ended or threading.Event()

    def outcomes(self, sequences: Iterator[RecordedSequence]) -> Iterator[tuple[RecordedSequence, Outcome]]:
        with ThreadPoolExecutor(CONCURRENT, "replay") as pool:
            while some := list(itertools.islice(sequences, CONCURRENT)):
                yield from zip(some, pool.map(self._outcome, some), strict=True)

    def _outcome(self, sequence: RecordedSequence) -> Outcome:
        if sequence.not_replayable:
            return Outcome(SKIPPED, f"not replayable: {', '.join(sequence.not_replayable)}")
        try:
            answer = self._answer(COMPLETIONS, asked(sequence))
            kind, text = self._compared(sequence, answer["choices"][0])
            return Outcome(kind, text, (sequence.system_fingerprint, answer.get("system_fingerprint")))
        except Refused as error:
            return Outcome(NOT_ANSWERED, f"not answered: {error}")
        except (LookupError, TypeError) as error:
            return Outcome(NOT_ANSWERED, f"not answered: the answer is not that of a MeshLM: {error!r}")

    def _compared(self, sequence: RecordedSequence, choice: Json) -> tuple[str, str]:
        recorded, now, before = sequence.output_token_ids, choice["token_ids"], sequence.finish_reason.value
        if (found := first_difference(recorded, now)) is not None:
            after = max(len(recorded), len(now)) - found.num_same - 1
            text = f"differs at token {found.num_same} of {len(recorded)}: {self._explained(sequence, found)}"
            return DIFFERS, f"{text}; {found.num_after} of {after} tokens after it differ"
        if sequence.finish_reason in ENDS and before != choice["finish_reason"]:
            reason = f"finish_reason {before} is now {choice['finish_reason']}"
            return DIFFERS, f"{len(recorded)} tokens are the same, and {reason}"
        gaps = [abs(one - other) for one, other in zip(sequence.logprobs or (), choice["logprobs"]["token_logprobs"])]
        largest = f"; log-probabilities differ by {max(gaps):.6f} at most" if any(gaps) else ""
        return SAME, f"same: {len(recorded)} tokens{largest}"

    def _explained(self, sequence: RecordedSequence, found: Difference) -> str:
        """Both tokens with their text, and their log-probabilities as the server computes them now."""
        ids = [token for token in (found.recorded, found.now) if token is not None]
        try:
            logprobs = self._logprobs(sequence, found.num_same, ids)
            names = {token: f"{token} {self._text(token)!r} ({logprobs[token]:.6f})" for token in ids}
        except Refused as error:
            return f"{found.recorded} is now {found.now}; their log-probabilities are not known: {error}"
        if found.recorded is None or found.now is None:
            return f"{names[ids[0]]} {'is new' if found.recorded is None else 'is not there now'}"
        gap = abs(logprobs[found.recorded] - logprobs[found.now])
        return f"{names[found.recorded]} is now {names[found.now]}, a gap of {gap:.6f}"

    def _logprobs(self, sequence: RecordedSequence, index: int, ids: Sequence[int]) -> dict[int, float]:
        """The model's own log-probabilities of these tokens behind the prompt and the first `index` recorded tokens."""
        body = {
            "model": sequence.body["model"],
            "prompt": [*sequence.body["prompt"], *sequence.output_token_ids[:index]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": len(ids),
            "logprob_token_ids": list(ids),
            "return_tokens_as_token_ids": True,
        }
        (top,) = self._answer(COMPLETIONS, body)["choices"][0]["logprobs"]["top_logprobs"]
        return {token: top[f"token_id:{token}"] for token in ids}

    def _text(self, token: int) -> str:
        return str(self._answer("/detokenize", {"tokens": [token]})["prompt"])

    def _answer(self, path: str, body: Json) -> Json:
        try:
            status, answer = batch.ask(self._server, path, body, self._ended, NOT_RECORDED)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(str(error) or type(error).__name__) from None
        try:
            found = json.loads(answer)
            if status == 200 and isinstance(found, dict):
                return found
            raise Refused(found["error"]["message"])
        except (ValueError, LookupError, TypeError):
            raise Refused(f"HTTP {status}, and no JSON: {answer[:200].decode(errors='replace')}") from None
