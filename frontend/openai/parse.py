"""A request body to what the mesh is asked: prompts and parameters. Pure; HttpError names the field at fault."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import embeds, limits, media_data, reasoning, sampling_params, structured, tool_choice
from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.prompts import of_chat, of_completion, of_template, with_media
from meshlm.frontend.openai.schema import MAX_SEQUENCES, ChatRequest, Common, CompletionRequest, StreamOptions
from meshlm.frontend.openai.tool_choice import ToolChoice
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import MediaPrompt, Prompt, TextParams
from meshlm.protocol.extras import Extras
from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.protocol.samplers import breakers_of
from meshlm.runtime.parsers import budgets, registry


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A chat's refusal is in the words of another API: `names` has its names of fields by the chat's."""
    try:
        yield
    except HttpError as error:
        name, message = names.get(error.param, error.param), error.message
        if name != error.param and message.startswith(error.param):
            message = name + message.removeprefix(error.param)
        raise HttpError(error.status, message.replace(".function.", "."), name, error.kind) from None


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a generation config says nothing of it


def completion(
    request: CompletionRequest, unknown: tuple[str, ...], resolved: Resolved, server: ServerConfig
) -> ParsedRequest:
    """POST /v1/completions."""
    reasoning.check_budget(request, server)
    if request.suffix and (request.echo or request.truncate_prompt_tokens):
        raise field_error("suffix", "goes with neither echo nor truncate_prompt_tokens")
    returned = request.n or 1
    generated = request.best_of or returned
    if generated < returned:
        raise HttpError(400, f"best_of ({generated}) must be at least n ({returned})", "best_of")
    if generated > returned and request.stream:
        raise HttpError(400, "best_of > n cannot be streamed", "best_of")
    logprobs = _num_logprobs("logprobs", request.logprobs, request, server, resolved)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    prompt_only = request.max_tokens == 0
    if prompt_only and not request.echo:
        raise field_error("max_tokens", "must be at least 1; 0 needs echo: true")
    if prompt_only and request.logprob_token_ids:
        raise field_error("logprob_token_ids", "max_tokens 0 has no output token")
    asked = request.max_tokens or (1 if prompt_only else DEFAULT_COMPLETION_TOKENS)
    most = _at_most(resolved.max_output_tokens, asked)
    prompts = _prompts(request, resolved, server)
    media = media_data.of_completion(request, len(prompts), resolved.spec.media)
    mesh = MeshRequest(prompts, max_tokens=most, num_choices=generated, media=media)
    answer = AnswerOptions(
        num_returned=returned,
        echo=bool(request.echo),
        logprobs=logprobs,
        prompt_logprobs=_num_prompt_logprobs(prompt_logprobs, server, resolved),
        prompt_only=prompt_only,
    )
    constraint = _Constraint(thinking_budget=reasoning.budget_of_completion(request, server))
    return _parsed(request, unknown, resolved, server, mesh, answer, constraint)


def _prompts(request: CompletionRequest, resolved: Resolved, server: ServerConfig) -> list[Prompt]:
    """The prompts of a completion: vectors first, as in vLLM, then texts and ids."""
    add_special, truncates = request.add_special_tokens is not False, bool(request.truncate_prompt_tokens)
    if not request.prompt_embeds:
        return of_completion(request.prompt, add_special, resolved, truncates, request.suffix or "")
    found = embeds.of_completion(request, resolved, server)
    if request.prompt:  # clients that must send one send "" or null
        found += of_completion(request.prompt, add_special, resolved, truncates)
    return found


def chat(
    request: ChatRequest, unknown: tuple[str, ...], resolved: Resolved, server: ServerConfig, *, media: bool = False
) -> ParsedRequest:
    """POST /v1/chat/completions. media: the messages may have media, where the model takes them."""
    if not request.messages:
        raise field_error("messages", "give at least one message")
    if request.top_logprobs and not request.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if any(kind != "text" for kind in request.modalities or ()):
        raise field_error("modalities", "only text is supported")
    reasoning.check_budget(request, server)
    choice = tool_choice.read(request)
    in_channels = tool_choice.has_channels(server)
    parser = server.tool_call_parser if choice.tools and (in_channels or not choice.forces) else ""
    grammar = tool_choice.grammar(choice, request, server)
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    logprobs = _num_logprobs("top_logprobs", num_top, request, server, resolved)
    asked = request.max_completion_tokens or request.max_tokens
    default = resolved.generation_defaults.get("max_tokens")
    template_kwargs = of_template(_template_kwargs(request), server)
    num_choices = request.n or 1
    begins_with_reasoning = reasoning.begins(
        server.reasoning_parser, template_kwargs, request.messages, request.continue_final_message
    )
    opened = begins_with_reasoning and reasoning.opened(
        server.reasoning_parser, template_kwargs, request.continue_final_message
    )
    most = _at_most(resolved.max_output_tokens, asked or (int(default) if default else None))
    tags = reasoning.tags(server.reasoning_parser) if begins_with_reasoning else ()
    text = TextParams(keep_special_tokens=(*tags, *registry.tags_of_calls(parser)))
    prompt, sources = _conversation(request, choice, template_kwargs, resolved, server, media)
    mesh = MeshRequest([prompt], text=text, max_tokens=most, cap_max_tokens=asked is None, num_choices=num_choices)
    mesh = mesh._replace(media=sources)
    answer = AnswerOptions(
        num_returned=num_choices,
        is_chat=True,
        logprobs=logprobs,
        prompt_logprobs=_num_prompt_logprobs(request.prompt_logprobs, server, resolved),
        client_names=_client_names(request),
        begins_with=_continued(request.messages[-1]) if request.echo else "",
        begins_with_reasoning=begins_with_reasoning,
        reasoning_parser=server.reasoning_parser,
        changes_content=reasoning.changes_content(server.reasoning_parser),
        opened_reasoning=opened,
        include_reasoning=request.include_reasoning,
        return_prompt_text=bool(request.return_prompt_text),
        return_assistant_tokens_mask=request.return_assistant_tokens_mask,
        tool_call_parser=parser,
        tool_choice=choice,
        tools=choice.tools,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    constraint = _Constraint(tool_grammar=grammar)
    if begins_with_reasoning:
        between = reasoning.before_grammar(server, opened, request.continue_final_message)
        has_channels = in_channels and grammar is not None  # that has the reasoning in it
        constraint = _Constraint(
            grammar,
            reasoning.budget_of_chat(request, server, opened),
            ("", "") if has_channels else between,
            (parser, tuple(choice.tools)),
        )
    return _parsed(request, unknown, resolved, server, mesh, answer, constraint)


def _conversation(
    request: ChatRequest,
    choice: ToolChoice,
    template_kwargs: dict[str, Any],
    resolved: Resolved,
    server: ServerConfig,
    media: bool,
) -> tuple[Prompt, list[MediaSource]]:
    """The prompt of a chat, with the vectors that its messages have; and the sources of their media."""
    messages, vectors = embeds.of_chat(request, resolved, server)
    messages, sources = with_media(messages, request.mm_processor_kwargs, resolved.spec.media if media else None)
    _check_with_media(request, bool(sources), bool(vectors))
    conversation = of_chat(
        messages,
        tool_choice.shown(choice, request, server),
        request.chat_template,
        template_kwargs,
        server,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
        media=bool(sources),
    )
    return MediaPrompt(conversation, vectors) if vectors else conversation, sources


def _check_with_media(request: ChatRequest, has_media: bool, has_vectors: bool) -> None:
    """Refuses what does not go together with media."""
    fields = {
        "use_beam_search": request.use_beam_search,
        "return_assistant_tokens_mask": request.return_assistant_tokens_mask,
        "return_token_offsets": request.return_token_offsets,
        embeds.NAME: has_vectors,
    }
    for name, given in fields.items():
        if given and has_media:
            raise field_error(name, "does not go with images")


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """The variables that the request gives the template. A field of its own wins over the same name in chat_template_kwargs."""
    wanted = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        wanted["documents"] = request.documents
    if request.reasoning_effort is not None:
        wanted["reasoning_effort"] = request.reasoning_effort
        wanted.setdefault("enable_thinking", request.reasoning_effort != "none")
    if request.verbosity is not None:
        wanted["verbosity"] = request.verbosity
    return wanted


def _continued(message: dict[str, Any]) -> str:
    """The text of an assistant's message, for an answer that shows it with what follows; parts are lines, as for the template."""
    content = message.get("content") if message["role"] == "assistant" else None
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text", part.get("refusal", "")) for part in content]
        return "\n".join(texts)
    return content or ""


class _Constraint(NamedTuple):
    """What an answer's text keeps to beside the request's own constraint."""

    tool_grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None
    reasoning_between: tuple[str, str] = ("", "")  # as `reasoning.before_grammar` gives it
    calls: tuple[str, tuple[str, ...]] = ("", ())  # the tool parser whose calls end reasoning, and the tools' names


def _parsed(
    request: Common,
    unknown: tuple[str, ...],
    resolved: Resolved,
    server: ServerConfig,
    mesh: MeshRequest,
    answer: AnswerOptions,
    constraint: _Constraint,
) -> ParsedRequest:
    """The request with the fields that both endpoints share."""
    _check_common(request, len(mesh.prompts), mesh.num_choices)
    lists = {
        "logit_bias": request.logit_bias or {},
        "allowed_token_ids": request.allowed_token_ids or (),
        "stop_token_ids": request.stop_token_ids or (),
        "logprob_token_ids": request.logprob_token_ids or (),
    }
    limits.check_lists(lists, len(mesh.prompts) * mesh.num_choices)
    # The best of several are chosen by their logprobs.
    chosen_by = max(answer.logprobs, 0) if mesh.num_choices > answer.num_returned else answer.logprobs
    sampling = sampling_params.from_request(request, resolved, chosen_by, answer.prompt_logprobs)
    grammar = _constrained(constraint, constraint.tool_grammar or structured.grammar(request, server))
    truncation = _truncation(request, resolved, None if mesh.cap_max_tokens else mesh.max_tokens)
    side = request.truncation_side or "left"
    prompts = embeds.checked(mesh.prompts, sampling, mesh.num_choices, truncation, side)
    text = sampling_params.text_params(request, truncation, mesh.text.keep_special_tokens)
    if request.use_beam_search:
        sampling_params.check_beams(request, resolved, text)
    others = sampling_params.extras(request, resolved)
    extras: Extras = (*(() if grammar is None else (grammar,)), *breakers_of(sampling), *others)
    mesh = mesh._replace(
        prompts=prompts,
        sampling=sampling,
        text=text,
        seed=None if request.seed is None else request.seed & 0x7FFF_FFFF_FFFF_FFFF,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        deterministic=bool(request.deterministic),
        timeout_s=request.timeout or 0.0,
        extras=extras,
        beams=request.use_beam_search,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
    )
    limits.check(mesh, bool(truncation), resolved)
    options, force_usage = request.stream_options or StreamOptions(), server.enable_force_include_usage
    as_ids = request.return_tokens_as_token_ids
    answer = answer._replace(
        stream=bool(request.stream),
        include_usage=force_usage or bool(options.include_usage),
        continuous_usage=force_usage or bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=server.return_tokens_as_token_ids if as_ids is None else as_ids,
        return_token_offsets=bool(request.return_token_offsets),
    )
    return ParsedRequest(mesh, answer, unknown, request.request_id or "")


def _constrained(constraint: _Constraint, grammar: Grammar | None) -> Grammar | None:
    """The grammar with what it must know of reasoning and calls; where there is none, that of a budget alone."""
    budget = constraint.thinking_budget
    if budget is not None and grammar is None:
        grammar = budgets.alone(budget)
    if grammar is None:
        return None
    opens_with, begins_after = constraint.reasoning_between if grammar.kind is not GrammarKind.FREE else ("", "")
    grammar = msgspec.structs.replace(grammar, opens_with=opens_with, begins_after=begins_after, thinking=budget)
    if budget is not None or begins_after:
        parser, tools = constraint.calls
        grammar = msgspec.structs.replace(grammar, calls=parser, tools=tools)
    return grammar


def _check_common(request: Common, num_prompts: int, num_choices: int) -> None:
    """Refuses fields that do not fit each other, and more sequences than one request may have."""
    if request.stream_options is not None and not request.stream:
        raise HttpError(400, "stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise HttpError(400, "prompt_logprobs are not available with stream: true", "prompt_logprobs")
    if num_prompts * num_choices > MAX_SEQUENCES:
        text = f"{num_prompts} prompts with {num_choices} choices each are more than {MAX_SEQUENCES} in one request"
        raise field_error("n", text)


def _at_most(limit: int | None, wanted: int | None) -> int | None:
    """Lowers max_tokens to what a generation config of the command line allows. vLLM is silent too; `finish_reason` says it."""
    return min((number for number in (limit, wanted) if number is not None), default=None)


def _truncation(request: Common, resolved: Resolved, max_tokens: int | None) -> int:
    """The number of the prompt's last tokens that stay; 0 keeps all."""
    wanted = request.truncate_prompt_tokens
    if wanted == 0:
        raise field_error("truncate_prompt_tokens", "0 leaves no prompt")
    wanted = wanted or 0
    return wanted if wanted >= 0 else max(1, resolved.max_model_len - (max_tokens or 1))


def _client_names(request: Common) -> dict[str, str]:
    """A chat has messages where the mesh has a prompt, and may have the newer name of max_tokens."""
    newer = getattr(request, "max_completion_tokens", None) is not None
    return {"prompt": "messages", **({"max_tokens": "max_completion_tokens"} if newer else {})}


def _num_logprobs(name: str, asked: int | None, request: Common, server: ServerConfig, resolved: Resolved) -> int:
    """The log-probabilities of each output token: so many of the likeliest, or those of certain tokens; -1: none."""
    certain = len(set(request.logprob_token_ids or ()))
    if asked is None:
        if certain:
            raise field_error("logprob_token_ids", "needs logprobs")
        return -1
    return certain or _limited(name, asked, server, resolved)


def _num_prompt_logprobs(asked: int | None, server: ServerConfig, resolved: Resolved) -> int:
    return -1 if asked is None else _limited("prompt_logprobs", asked, server, resolved)


def _limited(name: str, value: int, server: ServerConfig, resolved: Resolved) -> int:
    vocab_size = resolved.spec.vocab_size
    limit = vocab_size if server.max_logprobs == -1 else server.max_logprobs
    wanted = vocab_size if value == -1 else value
    if wanted > limit:
        raise HttpError(400, f"{name} {value} exceeds the server's limit of {limit} (--max-logprobs)", name)
    return wanted
