"""Token ids that came from elsewhere, as the answer that they would have been here: text, reasoning, calls. Pure."""

from array import array
from collections.abc import Sequence

from meshlm.frontend.choice import Choice, RowDetails
from meshlm.frontend.errors import HttpError
from meshlm.frontend.parse import ParsedRequest
from meshlm.frontend.rendering.schema import GenerateChoice, Generated
from meshlm.frontend.responses import WholeResponse
from meshlm.frontend.schema import MAX_SEQUENCES
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import FinishReason, Handle
from meshlm.protocol.text_edge import Accepted, Finished, Submit

REASONS = {reason.value: reason for reason in FinishReason} | {"tool_calls": FinishReason.STOP, None: FinishReason.STOP}


def checked(ask: ParsedRequest, found: Sequence[Generated], context: int) -> ParsedRequest:
    """The request as its answer is read. HttpError where there is more than a request can have."""
    choices = [choice for one in found for choice in one.choices]
    if not choices or len(choices) > MAX_SEQUENCES:
        text = f"choices: {len(choices)}; one answer has 1 to {MAX_SEQUENCES}"
        raise HttpError(400, text, "choices")
    if any(len(choice.token_ids or ()) > context for choice in choices):
        raise HttpError(400, f"token_ids: this model's maximum context length is {context} tokens", "token_ids")
    # Of the prompt nothing is known but its length, and log-probabilities are named by ids.
    return ask._replace(
        num_choices=len(choices),
        num_returned=len(choices),
        echo=False,
        logprobs=-1,
        prompt_logprobs=-1,
        return_token_ids=False,
        return_prompt_text=False,
        beams=False,
    )


def ids_of(entry: GenerateChoice) -> bytes:
    """The tokens to decode: the model's end is no text."""
    return pack_i32(entry.token_ids or [])


def tell(answer: WholeResponse, prompt_index: int, entry: GenerateChoice, num_prompt: int, text: str) -> None:
    """One choice comes to its answer."""
    ask = answer.ask
    submit = Submit((), (), ask.prompts[0], ask.sampling)
    choice = Choice(answer, len(answer.choices), prompt_index, submit, Handle(0))
    answer.choices.append(choice)
    answer.accepted(choice, Accepted((), num_prompt))
    choice.token_ids = array("i", entry.token_ids or [])
    choice.finished = Finished(0, REASONS[entry.finish_reason], None, len(choice.token_ids))
    answer.row(choice, len(choice.token_ids), text, RowDetails(choice.finished))
