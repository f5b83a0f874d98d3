"""What one HTTP request sends to the mesh: its Submits, their names and seeds. Called by generation.py.

Without an Idempotency-Key names and seeds are drawn here; with one they are made from it, and so the same each time.
"""

import hashlib
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from meshlm.frontend.http import retry
from meshlm.frontend.http.errors import NO_AUDIO, HttpError, as_http, field_error
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.audio import Audio
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import Retry, Submit, media_of
from meshlm.protocol.extras import find_extra, generates
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.protocol.wire.parts import joined
from meshlm.runtime.client.placement import Choice, ResponseSink, choices_of
from meshlm.runtime.mesh.media_parts import check_count


class Answer(ResponseSink, Protocol):
    """What is to have the choices: an answer, or a step of a search."""

    request_id: str


NO_TEXTS = "this server's model transcribes audio (/v1/audio/transcriptions), and takes no texts"
_OF_THE_SYSTEM = random.SystemRandom()


def draws_of(seed: int | None, index: int) -> random.Random:
    """The generator of seeds of HTTP process `index`: the same from each start on with --seed, otherwise chance."""
    return _OF_THE_SYSTEM if seed is None else random.Random(f"{seed} {index}")


def position(parsed_request: ParsedRequest, idempotency_key: retry.IdempotencyKey | None) -> retry.Position | None:
    """The place where the client's stream goes on; None for an answer without event ids."""
    num_choices = len(parsed_request.mesh.prompts) * parsed_request.mesh.num_choices
    if idempotency_key is None or not parsed_request.answer.stream or num_choices > retry.MAX_CHOICES:
        return None
    return retry.parse(idempotency_key.last_id, num_choices)


def build_each(
    answer: Answer,
    parsed_request: ParsedRequest,
    new_handle: Callable[[], Handle],
    rank: int,
    idempotency_key: retry.IdempotencyKey | None = None,
    cuts: tuple[int, ...] = (),
    draws: random.Random = _OF_THE_SYSTEM,
) -> Iterator[tuple[list[Choice], Submit]]:
    """One Submit per prompt, with a Choice for each sequence; fills answer.choices. `cuts`: by choice, what the client has. `draws`:
    the seeds of prompts to which the client gives none. None may be sent before the last is built: an answer ends with its choices."""
    mesh, options = parsed_request.mesh, parsed_request.answer
    if idempotency_key is not None:
        draws = random.Random(idempotency_key.seed)
    now = time.time()
    for prompt_index, prompt in enumerate(mesh.prompts):
        seed = draws.getrandbits(63) if mesh.seed is None else mesh.seed
        handles = tuple(new_handle() for _ in range(mesh.num_choices))
        first = prompt_index * mesh.num_choices
        unique = "" if idempotency_key else f"-{uuid.uuid4().hex[:8]}"
        names = tuple(RequestId(f"{answer.request_id}{unique}-{first + i}") for i in range(mesh.num_choices))
        mine = cuts[first : first + mesh.num_choices]
        submit = Submit(
            handles=handles,
            request_ids=names,
            prompt=prompt,
            sampling=msgspec.structs.replace(mesh.sampling, seed=seed),
            text=mesh.text,
            max_tokens=mesh.max_tokens,
            cap_max_tokens=mesh.cap_max_tokens,
            want_ids=options.return_token_ids
            or options.is_recorded
            or (options.echo and options.tokens_as_ids)
            or any(extra.needs_prompt_ids for extra in mesh.extras),
            want_text=options.echo or options.return_prompt_text,
            priority=mesh.priority,
            cache_salt=mesh.cache_salt,
            arrival_s=now,
            deadline_s=now + mesh.timeout_s if mesh.timeout_s else 0.0,
            dp_rank=rank,
            retry=Retry(idempotency_key.key, idempotency_key.body, mine) if idempotency_key else None,
            extras=mesh.extras,
        )
        yield choices_of(answer, submit, prompt_index), submit


def permitted(parsed_request: ParsedRequest, api_key: str, config: MeshConfig) -> ParsedRequest:
    """What a server with this configuration lets a key ask for. HttpError."""
    transcribes = config.resolved is not None and config.resolved.speech is not None
    if transcribes != any(find_extra(media_of(prompt), Audio) for prompt in parsed_request.mesh.prompts):
        raise HttpError(404, NO_TEXTS if transcribes else NO_AUDIO)
    if parsed_request.mesh.media:
        with as_http():
            check_count(parsed_request.mesh.media, config.media, parsed_request.mesh.media[0].param)
    if parsed_request.mesh.priority and config.scheduler.scheduling_policy != "priority":
        raise field_error("priority", "requests wait in order of arrival (--scheduling-policy)")
    if parsed_request.mesh.deterministic and not config.worker.deterministic:
        raise field_error("deterministic", "the server was started without --deterministic")
    server = config.server
    if server.record_requests and generates(parsed_request.mesh.extras):
        parsed_request = parsed_request.with_answer(is_recorded=True)
    several = len(server.api_key) + len(server.admin_api_key) > 1 or bool(server.api_key_file)
    if several and config.cache.prefix_caching_per_key:
        parsed_request = parsed_request.with_mesh(cache_salt=salt_of(api_key, parsed_request.mesh.cache_salt))
    return parsed_request._replace(api_key=api_key)


def salt_of(api_key: str, cache_salt: str) -> str:
    """The salt of the prefixes of one API key: `cached_tokens`, and the time to the first token, tell it nothing of another key's."""
    return hashlib.sha256(joined(api_key.encode(), cache_salt.encode())).hexdigest()[:32]


def dp_rank(headers: Mapping[str, str]) -> int:
    """The rank that the client chose; -1: none."""
    value = headers.get("x-data-parallel-rank")
    if value is None:
        return -1
    if not value.isdecimal() or len(value) > 6:
        raise field_error("X-data-parallel-rank", f"{value!r} is no rank number")
    return int(value)
