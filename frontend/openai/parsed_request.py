"""One request after its body was read: what the mesh is asked, and how the answer is written. Made by each API's parse.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from meshlm.frontend.openai.tool_choice import NO_CALLS, ToolChoice
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import Prompt, TextParams
from meshlm.protocol.extras import Extra
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.parsers.calls import Tools


class MeshRequest(NamedTuple):
    """What the mesh is asked."""

    prompts: list[Prompt]
    sampling: SamplingParams = SamplingParams()  # its seed is drawn later
    text: TextParams = TextParams()
    seed: int | None = None  # the client's
    max_tokens: int | None = None
    cap_max_tokens: bool = False  # max_tokens is a default: where the context leaves fewer, they are what it gets
    num_choices: int = 1  # per prompt, as generated
    priority: int = 0
    cache_salt: str = ""
    deterministic: bool = False  # the client asks for it
    timeout_s: float = 0.0
    extras: tuple[Extra, ...] = ()
    beams: bool = False  # the choices are those of one beam search
    length_penalty: float = 1.0
    # of the one prompt; emptied when they are read, as whole files are in it
    media: list[MediaSource] = []  # noqa: RUF012 - of a NamedTuple, whose default nobody changes


class AnswerOptions(NamedTuple):
    """How the answer is written, for the client who reads it."""

    num_returned: int = 1  # choices per prompt, of those that are generated (best_of >= n)
    is_chat: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False  # a completion's prompt is part of its answer
    logprobs: int = -1  # of each output token; -1: none
    prompt_logprobs: int = -1
    return_token_ids: bool = False  # the prompt's, and the answer's unless they are hidden
    tokens_as_ids: bool = False  # logprobs name tokens "token_id:5"
    return_prompt_text: bool = False
    is_recorded: bool = False  # --record-requests: the prompt's ids are told to the frontend alone
    return_token_offsets: bool = False
    return_assistant_tokens_mask: bool = False
    prompt_only: bool = False  # max_tokens 0: what is generated, as something must be, is not in the answer
    client_names: Mapping[str, str] = MappingProxyType({})  # of a field: the mesh's -> the client's, where they differ
    begins_with: str = ""  # a chat's last message, of which the answer is the rest
    begins_with_reasoning: bool = False  # or may, as its reasoning parser tells
    reasoning_parser: str = "qwen3"  # where it does
    opened_reasoning: bool = False  # whose opening text is in the prompt or in the message that it is the rest of
    changes_content: bool = False  # the reasoning parser does
    include_reasoning: bool = True
    tool_call_parser: str = ""  # how the model writes calls that the client wants to have; empty: it wants none
    tools: Tools = MappingProxyType({})  # that may be called
    tool_choice: ToolChoice = NO_CALLS
    parallel_tool_calls: bool = True

    @property
    def hides_tokens(self) -> bool:
        """Logprobs and ids of the answer would tell the reasoning that is left out."""
        return self.begins_with_reasoning and not self.include_reasoning


class ParsedRequest(NamedTuple):
    """One request of a client."""

    mesh: MeshRequest
    answer: AnswerOptions = AnswerOptions()
    unknown_fields: tuple[str, ...] = ()
    request_id: str = ""  # the client's
    api_key: str = ""  # whose request it is; "": no key is asked for

    def with_mesh(self, **changes: object) -> "ParsedRequest":
        """The same request, but for what the mesh is asked."""
        return self._replace(mesh=self.mesh._replace(**changes))  # type: ignore[arg-type]

    def with_answer(self, **changes: object) -> "ParsedRequest":
        """The same request, but for how its answer is written."""
        return self._replace(answer=self.answer._replace(**changes))  # type: ignore[arg-type]
