"""Token ids that came from elsewhere, as the answer that they would have been here: text, reasoning, calls, log-probabilities. Pure."""

import re
from array import array
from collections.abc import Mapping, Sequence

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.response_schema import ChatCompletionLogProb, ChatCompletionLogProbsContent
from meshlm.frontend.openai.responses import AnswerHead, Json, WholeResponse
from meshlm.frontend.openai.schema import MAX_SEQUENCES
from meshlm.frontend.rendering.schema import GenerateChoice, Generated
from meshlm.protocol.edges import text as edge
from meshlm.protocol.logprobs import LONGEST_BEGIN, pending_after, shown
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle
from meshlm.runtime.client.placement import Choice, RowDetails

REASONS = {reason.value: reason for reason in FinishReason} | {"tool_calls": FinishReason.STOP, None: FinishReason.STOP}
_BY_ID = re.compile(r"token_id:(\d{1,10})")  # how /inference/v1/generate names a token
Texts = Mapping[int, tuple[str, bytes]]  # of tokens: the text, and the bytes


def checked(parsed_request: ParsedRequest, found: Sequence[Generated], context: int) -> ParsedRequest:
    """The request as its answer is read. HttpError where there is more than a request can have, or what token ids do not tell."""
    choices = [choice for one in found for choice in one.choices]
    if not choices or len(choices) > MAX_SEQUENCES:
        raise field_error("choices", f"{len(choices)}; one answer has 1 to {MAX_SEQUENCES}")
    if not all(choice.token_ids for choice in choices):
        raise field_error("token_ids", "a choice needs one token at least")
    if any(len(choice.token_ids or ()) > context for choice in choices):
        raise field_error("token_ids", f"this model's maximum context length is {context} tokens")
    for name, is_asked in (
        ("echo", parsed_request.answer.echo),
        ("return_prompt_text", parsed_request.answer.return_prompt_text),
    ):
        if is_asked:
            raise field_error(name, "the prompt is not known here")
    tops = [len(one.top_logprobs) for choice in choices for one in _content(choice)]
    return parsed_request.with_mesh(num_choices=len(choices), beams=False).with_answer(
        num_returned=len(choices),
        logprobs=parsed_request.answer.logprobs
        if tops and parsed_request.answer.logprobs >= 0
        else max(tops, default=-1),
        prompt_logprobs=-1,
    )


def plain(parsed_request: ParsedRequest) -> ParsedRequest:
    """The request where its client did not say it: all text is content, as nothing tells that the model was to reason or call."""
    text = edge.TextParams()
    plain = parsed_request.with_answer(begins_with_reasoning=False, changes_content=False, tool_call_parser="")
    return plain.with_mesh(text=text)


def ids_of(entry: GenerateChoice) -> bytes:
    """The tokens to decode: the model's end is no text."""
    return pack_i32(entry.token_ids or [])


def named_ids(found: Sequence[Generated]) -> list[int]:
    """The tokens whose texts the log-probabilities need, each once."""
    needed = dict[int, None]()
    for choice in (choice for one in found for choice in one.choices):
        content = _content(choice)
        for position in content:
            for token in (position, *position.top_logprobs):
                if (token_id := _id_of(token)) is not None:
                    needed[token_id] = None
        if content:
            needed |= dict.fromkeys(choice.token_ids or ())
    return list(needed)


class DerenderedResponse(WholeResponse):
    """The answer. `found`: what came from elsewhere, one for each prompt."""

    def __init__(self, head: AnswerHead, found: Sequence[Generated]) -> None:
        super().__init__(head)
        self._found = found

    def passed_on(self) -> Json:
        return {
            name: next((given for one in self._found if (given := getattr(one, name)) is not None), None)
            for name in ("kv_transfer_params", "ec_transfer_params")
        }

    def _of_prompt(self, choice: Choice) -> Json:
        """Of the prompt nothing is known but its length, and the log-probabilities that came with the tokens."""
        return {"prompt_token_ids": None, "prompt_logprobs": self._found[choice.prompt_index].prompt_logprobs}

    def tell(
        self, prompt_index: int, entry: GenerateChoice, num_prompt: int, reply: edge.DetokenizeReply, texts: Texts
    ) -> None:
        """One choice comes."""
        parsed_request, ids = self.parsed_request, array("i", entry.token_ids or [])
        submit = edge.Submit((), (), parsed_request.mesh.prompts[0], parsed_request.mesh.sampling)
        choice = Choice(self, len(self.choices), prompt_index, submit, Handle(0))
        self.choices.append(choice)
        self.accepted(choice, edge.Accepted((), num_prompt))
        num_chars = unpack_i32(reply.num_chars).tolist()
        reason = REASONS[entry.finish_reason]
        text, stop_reason = _ended(parsed_request, reason, ids[-1], reply.text, num_chars[-1] if num_chars else 0)
        choice.token_ids = ids
        choice.finished = edge.Finished(0, reason, stop_reason, len(ids))
        logprobs = _positions(entry, ids, num_chars, texts, parsed_request.answer.logprobs)
        self.row(choice, len(ids), text, RowDetails(choice.finished, logprobs=logprobs))


def _ended(
    parsed_request: ParsedRequest, reason: FinishReason, last: int, text: str, last_chars: int
) -> tuple[str, str | int | None]:
    """The text without what has ended it, and the answer's `stop_reason`. `last_chars`: that the last token brought."""
    if reason is not FinishReason.STOP:
        return text, None
    includes = parsed_request.mesh.text.include_stop_str_in_output
    sampling = parsed_request.mesh.sampling
    if last in (*sampling.eos_token_ids, *sampling.stop_token_ids):
        shown_text = text if includes else text[: len(text) - last_chars]
        return shown_text, last if last not in sampling.eos_token_ids else None
    begin = len(text) - last_chars
    matches = [
        (at, -len(stop), stop)
        for stop in parsed_request.mesh.text.stop
        if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0
    ]
    if not matches:
        return text, None
    at, _, stop = min(matches)
    return text[: at + len(stop)] if includes else text[:at], stop


def _content(entry: GenerateChoice) -> list[ChatCompletionLogProbsContent]:
    return (entry.logprobs.content or []) if entry.logprobs is not None else []


def _id_of(token: ChatCompletionLogProb) -> int | None:
    found = _BY_ID.fullmatch(token.token)
    return int(found[1]) if found else None


def _positions(
    entry: GenerateChoice, ids: "array[int]", num_chars: Sequence[int], texts: Texts, num_top: int
) -> list[edge.PositionLogprobs]:
    """The log-probabilities with the texts of the tokens that they name by id; `num_top` of the likeliest at most."""
    content = _content(entry)
    cut = {token: data for token, (text, data) in texts.items() if text.encode() != data}
    aligned = len(content) == len(ids) == len(num_chars)
    found = list[edge.PositionLogprobs]()
    for place, position in enumerate(content):
        pending = pending_after(ids[max(0, place - LONGEST_BEGIN) : place], cut) if aligned else b""

        def of(token: ChatCompletionLogProb, pending: bytes = pending) -> edge.TokenLogprob:
            token_id = _id_of(token)
            if token_id is None:
                data = bytes(token.bytes) if token.bytes is not None else token.token.encode()
                return edge.TokenLogprob(-1, token.logprob, 0, token.token, data)
            text, data = texts[token_id]
            return edge.TokenLogprob(
                token_id, token.logprob, 0, shown(data, pending) if token_id in cut else text, data
            )

        own = of(position)
        found.append(
            edge.PositionLogprobs(
                own, num_chars[place] if aligned else len(own.text), tuple(map(of, position.top_logprobs[:num_top]))
            )
        )
    return found
