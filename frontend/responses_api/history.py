"""What a request of /v1/responses goes on with: the conversation before it, and the stored items that it refers to."""

from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import limits
from meshlm.frontend.responses_api import items, translate
from meshlm.frontend.responses_api.records import CONVERSATION
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.frontend.responses_api.shelf import Shelf

Json = dict[str, Any]
MAX_TURNS = 4096  # of a conversation


class History:
    """What the store has of conversations."""

    def __init__(self, stored: Shelf, max_model_len: int) -> None:
        self._shelf, self._max_model_len = stored, max_model_len

    async def complete(self, fields: ResponsesRequest, key: str) -> tuple[ResponsesRequest, list[Json]]:
        """The request with the items that it refers to, and the items of the conversation so far."""
        before = await self._before(fields, key)
        return await self._with_items(fields, before, key), before

    async def _before(self, fields: ResponsesRequest, key: str) -> list[Json]:
        """The items of the conversation so far, the oldest first."""
        if name := translate.conversation_of(fields):
            await self._shelf.conversation(name, key, "conversation")
            return await self._shelf.items(name)
        found = items.previous_items(fields.previous_input_messages)
        name, size = fields.previous_response_id or "", 0
        most = max(limits.MIN_PROMPT_BYTES, limits.BYTES_PER_TOKEN * self._max_model_len)
        for _ in range(MAX_TURNS):
            if not name:
                return found
            stored = await self._shelf.find(name, key, "previous_response_id")
            if stored.lease is not None:
                raise field_error("previous_response_id", f"the response {name[:80]!r} is still computed")
            if stored.previous.startswith(CONVERSATION):
                text = f"the response {name[:80]!r} is of a conversation; name that instead"
                raise field_error("previous_response_id", text)
            output = msgspec.json.decode(stored.answer)["output"]
            size += len(stored.items) + len(stored.answer)
            if size > 6 * most:
                break
            found = [*msgspec.json.decode(stored.items), *output, *found]
            name = stored.previous
        raise field_error("previous_response_id", "the conversation is too long")

    async def _with_items(self, fields: ResponsesRequest, before: list[Json], key: str) -> ResponsesRequest:
        """The request with the items that it refers to, of the conversation or of other responses, in the places of the references."""
        given = fields.input if isinstance(fields.input, list) else []
        names = [name for item in given if (name := items.referred(item)) is not None]
        if not names:
            return fields
        if len(names) > MAX_TURNS:
            raise field_error("input", f"at most {MAX_TURNS} references to items")
        known = {item["id"]: item for item in before if "id" in item}
        known |= await self._shelf.find_items([name for name in names if name not in known], key)
        if missing := [name for name in names if name not in known]:
            raise HttpError(404, f"input: there is no item {missing[0][:80]!r}", "input")
        resolved = [item if (name := items.referred(item)) is None else known[name] for item in given]
        return msgspec.structs.replace(fields, input=resolved)
