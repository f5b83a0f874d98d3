"""The bodies of the endpoints for vectors to what the mesh is asked. Pure; HttpError names the field at fault."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import limits
from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.prompts import MAX_PROMPTS, of_chat, of_ids, of_template, with_media
from meshlm.frontend.vectors import schema
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import PairPrompt, Prompt, TextParams, TextPrompt
from meshlm.protocol.pool import Pool
from meshlm.protocol.pooling import PoolingSpec, PoolingTask

_INPUT: Mapping[str, str] = MappingProxyType({"prompt": "input"})
MAX_PAIRS = 4096
PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))  # of POST /score


class Pairs(NamedTuple):
    """Texts that are compared, one against many or pair by pair."""

    queries: list[str]
    documents: list[str]

    @property
    def indices(self) -> list[tuple[int, int]]:
        """Which query goes with which document."""
        return [(place if len(self.queries) > 1 else 0, place) for place in range(len(self.documents))]


def spec_of(resolved: Resolved, task: PoolingTask | None = None) -> PoolingSpec:
    """What the server's vectors are. HttpError where it has none, or has no such task."""
    spec = resolved.pooling
    if spec is None:
        raise HttpError(404, "this server gives text, and no vectors (--runner pooling)")
    if task is not None and task not in spec.tasks:
        text = f"the model does not support the task {task!r}; it has {', '.join(map(repr, spec.tasks))}"
        raise HttpError(400, text, "task")
    return spec


def embeddings(body: schema.EncodingCommon, unknown: tuple[str, ...], config: MeshConfig) -> ParsedRequest:
    """POST /v1/embeddings and POST /pooling."""
    task: PoolingTask = "embed"
    if isinstance(body, schema.PoolingRequest):
        task = body.task or spec_of(_resolved(config)).tasks[0]
    spec = spec_of(_resolved(config), task)
    activation = body.use_activation if body.normalize is None else body.normalize
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise field_error("normalize", "it is use_activation's older name, which says otherwise")
    dimensions = _dimensions("dimensions", body.dimensions, spec, task)
    pool = spec.pool(task, activation=activation, dimensions=dimensions)
    prompts, media = prompts_of(body, config)
    return _asked(body, unknown, config, prompts, pool, media)


def classification(body: schema.ClassificationRequest, unknown: tuple[str, ...], config: MeshConfig) -> ParsedRequest:
    task = spec_of(_resolved(config), "classify").pool("classify", activation=body.use_activation)
    prompts, media = prompts_of(body, config)
    return _asked(body, unknown, config, prompts, task, media)


def _dimensions(name: str, wanted: int | None, spec: PoolingSpec, task: PoolingTask) -> int:
    """To how many numbers an embedding is cut; 0: not at all."""
    if wanted is None:
        return 0
    if task not in ("embed", "token_embed"):
        raise field_error(name, f"the task {task!r} has none")
    if not spec.matryoshka:
        text = f"{name}: the model does not support Matryoshka embeddings, so they must be unset, not {wanted}"
        raise HttpError(400, text, name)
    if not 1 <= wanted <= spec.size:
        raise field_error(name, f"the model supports 1 to {spec.size}, got {wanted}")
    if spec.matryoshka_dimensions and wanted not in spec.matryoshka_dimensions:
        some = ", ".join(map(str, spec.matryoshka_dimensions))
        raise field_error(name, f"the model supports {some}, got {wanted}")
    return wanted


def prompts_of(body: schema.InputCommon, config: MeshConfig) -> tuple[list[Prompt], list[MediaSource]]:
    """Texts, token ids or conversations; and the sources of the media of one conversation."""
    resolved = _resolved(config)
    given, messages = body.input, body.messages
    if (given is None) == (messages is None):
        raise field_error("input", "give either input or messages")
    if given is not None and not _is_chat(given):
        add_special = body.add_special_tokens is not False
        truncates = bool(body.truncate_prompt_tokens) or chunked(resolved)
        if body.mm_processor_kwargs:
            raise field_error("mm_processor_kwargs", "goes with messages")
        return _of_input(given, add_special, resolved, truncates=truncates), []
    name = "input" if messages is None else "messages"
    conversations = given if messages is None else messages
    assert isinstance(conversations, list)
    if not conversations:
        raise field_error(name, "give at least one message")
    several = conversations if isinstance(conversations[0], list) else [conversations]
    if len(several) > MAX_PROMPTS:
        raise field_error(name, f"at most {MAX_PROMPTS} conversations")
    kwargs = of_template(body.chat_template_kwargs or {}, config.server)
    found: list[Prompt] = []
    media: list[MediaSource] = []
    for one in several:
        if not isinstance(one, list) or not one or not all(isinstance(message, dict) for message in one):
            raise field_error(name, "a conversation is a list of messages")
        shown, sources = with_media(one, body.mm_processor_kwargs, resolved.spec.media)
        media += sources
        found.append(
            of_chat(
                shown,
                None,
                body.chat_template,
                kwargs,
                config.server,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                add_special_tokens=body.add_special_tokens is True,
                media=bool(sources),
            )
        )
    if media and len(several) > 1:
        raise field_error(name, "images go with one conversation in a request")
    return found, media


def _is_chat(given: Any) -> bool:
    """vLLM takes messages as `input` too."""
    first = given[0] if isinstance(given, list) and given else None
    first = first[0] if isinstance(first, list) and first else first
    return isinstance(first, dict)


def _of_input(given: Any, add_special: bool, resolved: Resolved, *, truncates: bool) -> list[Prompt]:
    many = isinstance(given, list) and (not given or not isinstance(given[0], int | float))
    items = given if many else [given]
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise field_error("input", f"give 1 to {MAX_PROMPTS} inputs, got {len(items)}")
    found: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            found.append(TextPrompt(item, add_special))
            continue
        prompt = of_ids(item, resolved, truncates, "input")
        if prompt is None:
            raise field_error("input", "must be text, a list of token ids, or a list of either")
        found.append(prompt)
    return found


def pairs_of(body: schema.ScoreRequest) -> Pairs:
    """The texts of POST /score, by any of their names."""
    for first, second in PAIRS:
        one, other = getattr(body, first), getattr(body, second)
        if one is not None and other is not None:
            return _checked(one, other, first, second)
    raise field_error("queries", "give queries and documents, or text_1 and text_2")


def pairs_of_rerank(body: schema.RerankRequest) -> Pairs:
    """The query and the documents of POST /rerank."""
    given = [body.documents] if isinstance(body.documents, str) else body.documents
    documents = []
    for item in given:
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise field_error("documents", "each must be text, or an object with a text; images are not supported")
        documents.append(text)
    return _checked([body.query], documents, "query", "documents")


def _checked(one: str | list[str], other: str | list[str], first: str, second: str) -> Pairs:
    queries, documents = ([given] if isinstance(given, str) else given for given in (one, other))
    if not queries or not documents:
        name = second if queries else first
        raise field_error(name, "give at least one text")
    if len(queries) not in (1, len(documents)):
        raise field_error(first, f"there must be one, or as many as {second}: 1:1, 1:N or N:N")
    if len(documents) > MAX_PAIRS:
        raise field_error(second, f"at most {MAX_PAIRS} in one request")
    return Pairs(queries, documents)


def scoring(body: schema.ScoringCommon, pairs: Pairs, unknown: tuple[str, ...], config: MeshConfig) -> ParsedRequest:
    """POST /score and /rerank: pairs for a classifier, single texts for embeddings, whose vectors are compared."""
    resolved = _resolved(config)
    spec = spec_of(resolved)
    task = spec.scores_by
    if task == "token_classify" or (task == "classify" and spec.size != 1):
        raise HttpError(400, "the model does not compare texts: that needs a classifier with one label, or embeddings")
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if getattr(body, name) >= resolved.max_model_len:
            raise field_error(name, f"must be less than the model's context, {resolved.max_model_len}")
    if task != "classify":
        if body.max_tokens_per_query or body.max_tokens_per_doc:
            raise field_error("max_tokens_per_doc", "embeddings have truncate_prompt_tokens")
        texts: list[Prompt] = [TextPrompt(text) for text in (*pairs.queries, *pairs.documents)]
        return _asked(body, unknown, config, texts, spec.pool(task))
    kwargs = dict(body.chat_template_kwargs or {})
    if body.instruction is not None:
        kwargs.setdefault("instruction", body.instruction)
    if kwargs and not config.model.chat_template:
        raise field_error("instruction", "it needs a server with --chat-template for queries and documents")
    found = [
        _pair(pairs.queries[query], pairs.documents[document], body, kwargs, config)
        for query, document in pairs.indices
    ]
    return _asked(body, unknown, config, found, spec.pool("classify", activation=body.use_activation))


def _pair(query: str, document: str, body: schema.ScoringCommon, kwargs: dict[str, Any], config: MeshConfig) -> Prompt:
    if config.model.chat_template:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return of_chat(
            messages,
            None,
            None,
            of_template(kwargs, config.server),
            config.server,
            add_generation_prompt=False,
            continue_final_message=False,
            add_special_tokens=True,
        )
    joined = not _resolved(config).spec.encoder_only
    return PairPrompt(query, document, joined, body.max_tokens_per_query, body.max_tokens_per_doc)


def cohere(body: schema.CohereEmbedRequest, unknown: tuple[str, ...], config: MeshConfig) -> ParsedRequest:
    spec = spec_of(_resolved(config), "embed")
    if body.images is not None:
        raise field_error("images", "images are not supported")
    texts = body.texts
    if texts is None and body.inputs is not None:
        texts = [_text_of(item) for item in body.inputs]
    if not texts or (body.texts is not None and body.inputs is not None):
        raise field_error("texts", "give either texts or inputs, and at least one")
    if len(texts) > MAX_PROMPTS:
        raise field_error("texts", f"at most {MAX_PROMPTS}")
    before = ""
    if body.input_type is not None:
        if body.input_type not in spec.prompts:
            names = ", ".join(sorted(spec.prompts)) or "none"
            raise field_error("input_type", f"the model has no prompt {body.input_type!r}; it has {names}")
        before = spec.prompts[body.input_type]
    dimensions = _dimensions("output_dimension", body.output_dimension, spec, "embed")
    prompts: list[Prompt] = [TextPrompt(before + text) for text in texts]
    common = schema.VectorsCommon(
        truncate_prompt_tokens=None if body.truncate == "NONE" else body.max_tokens or -1,
        truncation_side="left" if body.truncate == "START" else "right",
        priority=body.priority,
    )
    return _asked(common, unknown, config, prompts, spec.pool("embed", dimensions=dimensions))


def _text_of(item: dict[str, Any]) -> str:
    parts = item.get("content")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise field_error("inputs", "each must have a content of texts; images are not supported")
    return "\n".join(map(str, texts))


def _asked(
    body: schema.VectorsCommon,
    unknown: tuple[str, ...],
    config: MeshConfig,
    prompts: list[Prompt],
    task: Pool,
    media: list[MediaSource] | None = None,
) -> ParsedRequest:
    resolved = _resolved(config)
    truncates = body.truncate_prompt_tokens is not None or chunked(resolved)
    for prompt in prompts:
        limits.check_prompt(prompt, truncates, resolved)
    text, keep = TextParams(), body.truncate_prompt_tokens
    if keep is not None:
        if keep == 0 or keep > resolved.max_model_len:
            raise field_error("truncate_prompt_tokens", f"must be -1, or 1 to {resolved.max_model_len}, got {keep}")
        most = resolved.max_model_len if keep < 0 else keep
        text = TextParams(truncate_prompt_tokens=most, truncation_side=body.truncation_side or "right")
    mesh = MeshRequest(
        prompts,
        text=text,
        seed=0,
        max_tokens=1,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        extras=(task,),
        media=media or [],
    )
    answer = AnswerOptions(include_usage=True, client_names=_INPUT, prompt_only=True)
    return ParsedRequest(mesh, answer, unknown, body.request_id or "")


def chunked(resolved: Resolved) -> bool:
    """Whether texts longer than the context are embedded in parts."""
    return resolved.pooling is not None and resolved.pooling.chunks


def _resolved(config: MeshConfig) -> Resolved:
    return config.require_resolved()
