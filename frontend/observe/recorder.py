"""The recordings of one frontend (--record-requests): a line for each sequence that it answered, from which `meshlm replay` computes it
again. Owned by observer.py.

Lines are made and written in a thread of their own. Where that does not keep up requests are left out, which the log says.
"""

import asyncio
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import parse, render
from meshlm.frontend.openai.parsed_request import MeshRequest, ParsedRequest
from meshlm.frontend.openai.responses import Response
from meshlm.frontend.openai.schema import CompletionRequest
from meshlm.protocol.audio import Audio
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.text import media_of
from meshlm.protocol.extras import Extra, find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.media import Media
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.recording import RecordedSequence
from meshlm.protocol.wire.columns import unpack_i32
from meshlm.protocol.wire.ids import FinishReason, Identity

MAX_WAITING = 256  # requests that are not written yet
SUFFIX, OLDER = ".jsonl", ".older.jsonl"
# Of SamplingParams: drawn, in MeshRequest, made by the detokenizer, and more than the client's with best_of. Of TextParams: what a
# prompt of token ids has behind it.
ASIDE = ("seed", "max_tokens", "bad_words_token_ids", "logprobs", "truncate_prompt_tokens", "truncation_side")
FIELDS: dict[type[Extra], str] = {
    PromptEmbeds: "prompt_embeds",
    Audio: "file",
    Media: "multi_modal_data",
}  # the client's names
SHOWN = "keep_special_tokens"  # matters where a stop string is looked for
_encode = msgspec.json.Encoder().encode


class Recorder:
    """`log` is the process's; it is used by the loop alone."""

    def __init__(self, server: ServerConfig, resolved: Resolved, identity: Identity, log: Any) -> None:
        self._server, self._resolved, self._log = server, resolved, log
        self._file = Path(server.record_requests) / f"{server.port}-{identity.index}{SUFFIX}"
        self._pool = ThreadPoolExecutor(1, "recorder")
        self._num_waiting = self._num_left_out = 0

    def ended(self, answer: Response, path: str) -> None:
        """The answer changes no more."""
        if not answer.parsed_request.answer.is_recorded:
            return
        if self._num_waiting == MAX_WAITING:
            self._leave_out(f"{MAX_WAITING} wait to be written")
            return
        self._num_waiting += 1
        writing = asyncio.get_running_loop().run_in_executor(self._pool, self._write, answer, path)
        writing.add_done_callback(self._written)

    def _write(self, answer: Response, path: str) -> None:
        for sequence in sequences(answer, path, self._resolved, self._server):
            line, most = _encode(sequence) + b"\n", self._server.record_requests_bytes // 2
            if len(line) > most:
                raise OSError(errno.EFBIG, "a sequence is longer than half of --record-requests-bytes")
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file.exists() and self._file.stat().st_size + len(line) > most:
                self._file.replace(self._file.with_suffix(OLDER))
            with open(self._file, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                file.write(line)

    def _written(self, writing: "asyncio.Future[None]") -> None:
        self._num_waiting -= 1
        error = writing.exception()
        if isinstance(error, OSError):
            self._leave_out(f"--record-requests {self._server.record_requests}: {error.strerror}")
        elif error is not None:
            raise error
        elif self._num_left_out:
            self._log.warning("requests are recorded again", left_out=self._num_left_out)
            self._num_left_out = 0

    def _leave_out(self, reason: str) -> None:
        if not self._num_left_out:
            self._log.warning("requests are not recorded", reason=reason)
        self._num_left_out += 1

    def close(self) -> None:
        """What waits is written."""
        self._pool.shutdown()


def sequences(answer: Response, path: str, resolved: Resolved, server: ServerConfig) -> Iterator[RecordedSequence]:
    """Those that have tokens. One whose client may come back is left to the connection that sees its end."""
    of_prompt: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for choice in answer.choices:
        finished, accepted = choice.finished, answer.prompt.get(choice.prompt_index)
        if accepted is None or not choice.token_ids or (finished is None and choice.submit.retry is not None):
            continue
        if choice.prompt_index not in of_prompt:
            ids = unpack_i32(accepted.prompt_token_ids).tolist()
            body = render.completion_alone(answer.parsed_request, ids, answer.model, resolved.max_model_len)
            prompt = answer.parsed_request.mesh.prompts[choice.prompt_index]
            lost = lost_fields(answer.parsed_request, body, media_of(prompt), resolved, server)
            of_prompt[choice.prompt_index] = body, lost
        body, lost = of_prompt[choice.prompt_index]
        yield RecordedSequence(
            custom_id=choice.submit.request_ids[0],
            body={**body, "seed": choice.submit.sampling.seed},
            output_token_ids=choice.token_ids.tolist(),
            finish_reason=FinishReason.ABORT if finished is None else finished.reason,
            logprobs=answer.sampled_logprobs(choice),
            request_id=answer.request_id,
            choice=choice.index,
            path=path,
            created=answer.created,
            root=resolved.model_path,
            system_fingerprint=answer.fingerprint,
            not_replayable=lost,
        )


def lost_fields(
    parsed_request: ParsedRequest,
    body: dict[str, Any],
    media: tuple[Extra, ...],
    resolved: Resolved,
    server: ServerConfig,
) -> list[str]:
    """The fields that decide tokens and are not the same once `body` is read as a completion: none is lost in silence."""
    mesh = parsed_request.mesh
    found = [_field(extra) for extra in media] + ["use_beam_search"] * mesh.beams
    if not found:
        try:
            completion, _ = bodies.converted(body, CompletionRequest)
            found = _differing(mesh, parse.completion(completion, (), resolved, server).mesh)
        except HttpError as error:
            found = [error.param or "prompt"]
    return found


def _differing(one: MeshRequest, other: MeshRequest) -> list[str]:
    found = [
        name
        for mine, read in ((one.sampling, other.sampling), (one.text, other.text))
        for name in mine.__struct_fields__
        if getattr(mine, name) != getattr(read, name) and name not in ASIDE and (name != SHOWN or one.text.stop)
    ]
    grammars = [find_extra(mesh.extras, Grammar) for mesh in (one, other)]
    plain = [grammar and msgspec.structs.replace(grammar, param="") for grammar in grammars]
    if plain[0] != plain[1] and grammars[0] is not None:
        found.append(grammars[0].param.partition(".")[0] or "thinking_token_budget")
    known = [*other.extras, *grammars]
    return found + [_field(extra) for extra in one.extras if extra not in known]


def _field(extra: Extra) -> str:
    return FIELDS.get(type(extra)) or str(extra.__struct_config__.tag)
