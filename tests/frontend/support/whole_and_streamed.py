"""An answer of POST /v1/responses, asked for whole and as a stream, and compared."""

from typing import Any

import openai
from openai.types.responses import Response

Json = dict[str, Any]
TIMES = ("created_at", "completed_at")


async def both(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """The answer, which is the same whole, at a stream's end, and as the client puts a stream together."""
    asked: Any = {"model": "tiny", "input": "hi", "extra_body": {"request_id": "one"}, "store": False, **fields}
    whole: Response = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert lasting(last.response) == lasting(whole)
    assert put_together(events) == lasting(whole)["output"]
    return whole


def lasting(response: Response) -> Json:
    found = response.to_dict(mode="json")
    return {name: value for name, value in found.items() if name not in TIMES}


def put_together(events: list[Any]) -> list[Json]:
    """The output, from the deltas alone, checked against what each event says is done."""
    items: list[Json] = []
    texts: list[str] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append(event.item.to_dict(mode="json"))
                texts.append("")
            case "response.content_part.added":
                assert (event.item_id, event.content_index) == (items[-1]["id"], 0)
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                assert (event.item_id, event.output_index) == (items[-1]["id"], len(items) - 1)
                texts[-1] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == texts[-1]
            case "response.function_call_arguments.done":
                assert event.arguments == texts[-1]
            case "response.content_part.done":
                assert event.part.text == texts[-1]
            case "response.output_item.done":
                assert event.item.id == items[-1]["id"]
                items[-1] = event.item.to_dict(mode="json")
    return items
