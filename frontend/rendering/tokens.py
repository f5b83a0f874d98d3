"""POST /inference/v1/generate: token ids in, token ids out. Its body is read as a completion's; its answers are made here."""

from collections.abc import Sequence
from typing import Any

import msgspec

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.response_fields import by_id, chat_logprobs
from meshlm.frontend.openai.responses import DONE, WholeResponse, data_event, visible_reason
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.rendering.schema import GenerateRequest
from meshlm.frontend.requests.generation import Form
from meshlm.protocol.edges.text import PositionLogprobs
from meshlm.protocol.kv_transfer import NAME
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import Choice, RowDetails

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
EXTRA = {"extra_args": "vllm_xargs"}  # SamplingParams' name of it
OF_PYTHON = ("detokenize", "output_kind", "skip_clone", "flat_logprobs")  # vLLM's, that say nothing of the tokens


def completion_of(body: GenerateRequest) -> Json:
    """The fields of a completion that asks for the same."""
    if body.sampling_params.get("prompt_embeds") is not None:
        raise field_error("sampling_params.prompt_embeds", "not supported; the prompt is token_ids")
    sampling = {EXTRA.get(name, name): value for name, value in body.sampling_params.items() if name not in OF_PYTHON}
    rest: Json = {
        "model": body.model,
        "stream": body.stream,
        "stream_options": body.stream_options,
        "cache_salt": body.cache_salt,
        "request_id": body.request_id,
        NAME: body.kv_transfer_params,
    }
    if body.stream_options is not None:
        rest["stream_options"] = msgspec.structs.asdict(body.stream_options)
    rest = {name: value for name, value in rest.items() if value is not None}
    return {**sampling, **rest, "prompt": body.token_ids, "priority": body.priority, "return_token_ids": True}


def _logprobs(parsed_request: ParsedRequest, positions: Sequence[PositionLogprobs] | None) -> Json | None:
    """As vLLM: of no further token, and beside certain ones, top_logprobs has the sampled one."""
    if positions is None or parsed_request.answer.logprobs < 0:
        return None
    return chat_logprobs(
        by_id(positions),
        has_sampled=parsed_request.answer.logprobs == 0 or bool(parsed_request.mesh.sampling.logprob_token_ids),
    )


class WholeTokens(WholeResponse):
    """An answer that is not streamed."""

    def body(self) -> bytes:
        choices = [self._tokens(choice) for choice in self._best()]
        found: Json = {"request_id": self.request_id, "model": self.model, "created": self.created, "choices": choices}
        found |= {"usage": self.usage(), NAME: self.kv_transfer(), "ec_transfer_params": None}
        found["usage"]["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
        return _encode({**found, "prompt_logprobs": self._of_prompt(self.choices[0]).get("prompt_logprobs")})

    def _tokens(self, choice: Choice) -> Json:
        assert choice.finished is not None
        return {
            "index": choice.index,
            "logprobs": _logprobs(self.parsed_request, self._logprobs.get(choice.index)),
            "finish_reason": visible_reason(choice.finished),
            "token_ids": choice.token_ids.tolist(),
            "routed_experts": None,
        }


class StreamedTokens(StreamResponse):
    """Each row is an event."""

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        finished = details.finished if details is not None else None
        if details is not None:
            self.note(choice, details)
        failed = finished is not None and finished.reason is FinishReason.ERROR
        if not failed and (num_tokens or finished is not None):
            entry = {
                "index": choice.index,
                "logprobs": _logprobs(self.parsed_request, details.logprobs if details is not None else None),
                "finish_reason": visible_reason(finished) if finished is not None else None,
                "token_ids": choice.token_ids[len(choice.token_ids) - num_tokens :].tolist(),
                "routed_experts": None,
            }
            event: Json = {"request_id": self.request_id, "choices": [entry], "usage": None}
            if self.options.continuous_usage:
                prompt, output = self.prompt[choice.prompt_index].num_prompt_tokens, len(choice.token_ids)
                event["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            self._emit(choice, data_event(event), ended=finished is not None)
        if finished is not None:
            self.ended()

    def last_events(self) -> bytes:
        """The events after the end: usage if asked for, or the error, then [DONE]."""
        if self.error is not None:
            return data_event(self.error.response()) + DONE
        if not self.options.include_usage:
            return DONE
        return data_event({"request_id": self.request_id, "choices": [], "usage": self.usage()}) + DONE


TOKENS = Form(WholeTokens, StreamedTokens)
