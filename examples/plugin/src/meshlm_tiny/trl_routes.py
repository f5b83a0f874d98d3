"""The routes of `trl vllm-serve` for trl's older clients, made of MeshLM's own.

Their /init_communicator/ and /update_named_param/ make a group in which a worker of the server is rank 0 and the trainer the last one:
that is refused by name, with what there is instead.
"""

from collections.abc import Sequence
from typing import Any

from meshlm.frontend.endpoints import EndpointRequest, Endpoints, Route

INSTEAD = (
    "weights come by POST /init_weight_transfer_engine and /update_weights (trl 1.16 and later), where the trainer is rank 0 of the "
    "group, or from a folder by POST /update_weights_from_disk (docs/rl.md); both need --server-dev-mode"
)
OF_COMMUNICATOR = ("/init_communicator/", "/update_named_param/", "/batch_update_named_params/")
# As they are called here, where they are the same.
SAMPLING = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "truncate_prompt_tokens")
NO_IMAGES = "images: prompts of this route are texts"


class TrlRoutes(Endpoints):
    def routes(self) -> Sequence[Route]:
        refused = [Route("POST", path, "Not there; says what is.", self.refuse, is_admin=True) for path in OF_COMMUNICATOR]
        return [
            Route("GET", "/health/", "Whether requests are served.", self.health),
            Route("GET", "/get_world_size/", "The number of workers.", self.world_size),
            Route("POST", "/generate/", "Completions of prompts, as token ids.", self.generate),
            Route("POST", "/chat/", "Answers to conversations, as token ids.", self.chat),
            Route("POST", "/reset_prefix_cache/", "Forget what was computed.", self.reset, is_admin=True),
            Route("POST", "/close_communicator/", "There is none: nothing is done.", self.close, is_admin=True),
            *refused,
        ]

    async def health(self, request: EndpointRequest) -> Any:
        await request.ask("GET", "/health")
        return {"status": "ok"}

    async def world_size(self, request: EndpointRequest) -> Any:
        parallel = self.config.parallel
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
        return {"world_size": sizes[0] * sizes[1] * sizes[2]}

    async def generate(self, request: EndpointRequest) -> Any:
        body = _body(request, "prompts")
        if body.get("images"):
            raise ValueError(NO_IMAGES)
        asked = {"prompt": body["prompts"], **_sampling(body, self.config.resolved)}
        answer = await request.ask("POST", "/v1/completions", {**asked, "logprobs": 0})
        choices, each = answer["choices"], int(asked.get("n") or 1)
        return {
            "prompt_ids": [one["prompt_token_ids"] for one in choices[::each]],
            "completion_ids": [one["token_ids"] for one in choices],
            "logprobs": [one["logprobs"]["token_logprobs"] for one in choices],
        }

    async def chat(self, request: EndpointRequest) -> Any:
        body = _body(request, "messages")
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for messages in body["messages"]:
            asked = {"messages": messages, **_sampling(body, self.config.resolved), "logprobs": True}
            asked |= {name: body[name] for name in ("tools", "chat_template_kwargs") if body.get(name)}
            answer = await request.ask("POST", "/v1/chat/completions", asked)
            found["prompt_ids"].append(answer["prompt_token_ids"])
            for choice in answer["choices"]:
                found["completion_ids"].append(choice["token_ids"])
                found["logprobs"].append([one["logprob"] for one in choice["logprobs"]["content"]])
        return found

    async def reset(self, request: EndpointRequest) -> Any:
        await request.ask("POST", "/reset_prefix_cache")
        return {"message": "Request received, resetting prefix cache"}

    async def close(self, request: EndpointRequest) -> Any:
        return {"message": "Request received, closing communicator"}

    async def refuse(self, request: EndpointRequest) -> Any:
        raise ValueError(INSTEAD)


def _body(request: EndpointRequest, field: str) -> dict[str, Any]:
    body = request.body
    if not isinstance(body, dict) or not isinstance(body.get(field), list) or not body[field]:
        raise ValueError(f"{field}: a list with at least one is expected")
    return body


def _sampling(body: dict[str, Any], resolved: Any) -> dict[str, Any]:
    """Fields of the body as /v1/completions and /v1/chat/completions have them. Those of generation_kwargs count more."""
    asked = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    pattern = body.get("structured_outputs_regex") or body.get("guided_decoding_regex")
    if pattern:
        asked["structured_outputs"] = {"regex": pattern}
    more = body.get("generation_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError("generation_kwargs: an object is expected")
    return {"model": resolved.served_names[0], "max_tokens": 16, "return_token_ids": True, **asked, **more}
