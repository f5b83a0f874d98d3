"""`LLM.embed`, `classify`, `score`, `reward` and `encode`: what they ask of the mesh, and their results, with vLLM's names."""

import dataclasses
import os
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import PairPrompt, Prompt, Submit, TextParams, TextPrompt, TokenPrompt
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import PoolingSpec, PoolingTask
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Handle
from meshlm.runtime import io_processors
from meshlm.runtime.similarity import cosine, lines_of, max_sim, of_tokens
from meshlm.supervisor.api.arguments import refuse
from meshlm.supervisor.api.background import Background, Bar, progress_bar, unless_ended
from meshlm.supervisor.api.client import Sent, name_of
from meshlm.supervisor.api.offline_prompts import Given, Texts, many, of_generate, of_tokenization
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class PoolingParams:
    """How vectors are made; None is the model's own way."""

    truncate_prompt_tokens: int | None = None  # -1: as many as the context holds
    dimensions: int | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None


ManyParams = PoolingParams | Sequence[PoolingParams] | None


@dataclass(repr=False)
class PoolingOutput:
    """The numbers of one prompt: a vector, or one for each token."""

    values: "array[float]"
    rows: int = 0  # tokens that have one each; 0: it is one vector

    @property
    def data(self) -> "NDArray[np.float32]":
        """[size], or [tokens, size]. Where vLLM has a tensor; torch.from_numpy makes one of it."""
        import numpy as np

        found = np.array(self.values, np.float32)
        return found.reshape(self.rows, -1) if self.rows else found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.values)} numbers)"


class EmbeddingOutput(PoolingOutput):
    @property
    def embedding(self) -> list[float]:
        return self.values.tolist()

    @property
    def hidden_size(self) -> int:
        return len(self.values)


class ClassificationOutput(PoolingOutput):
    @property
    def probs(self) -> list[float]:
        return self.values.tolist()

    @property
    def num_classes(self) -> int:
        return len(self.values)


class ScoringOutput(PoolingOutput):
    @property
    def score(self) -> float:
        return self.values[0]


@dataclass
class PoolingRequestOutput:
    """The result of one prompt; `outputs` is one of the classes above."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def result_of(request: RequestOutput, pool: Pool, kind: type[PoolingOutput]) -> PoolingRequestOutput:
    flat, rows = array("f", request.outputs[0].pooled), 0
    if pool.kind is PoolKind.ALL:
        flat, rows = of_tokens(flat, request.prompt_token_ids, pool)
    output = kind(flat, rows)
    return PoolingRequestOutput(request.request_id, output, request.prompt_token_ids, request.num_cached_tokens)


def scores_of(
    found: Sequence[RequestOutput], pool: Pool, indices: list[tuple[int, int]], first: int
) -> list[PoolingRequestOutput]:
    """Scores of pairs: a classifier's, or how alike their vectors are."""
    if pool.head is PoolHead.CLASSIFY:
        return [result_of(request, pool, ScoringOutput) for request in found]
    vectors = [array("f", request.outputs[0].pooled) for request in found]
    scores = []
    for query, document in indices:
        one, other = found[query], found[first + document]
        if pool.kind is PoolKind.ALL:
            ids_of = [(vectors[at], found[at].prompt_token_ids) for at in (query, first + document)]
            lines = [lines_of(*of_tokens(flat, ids, pool)) for flat, ids in ids_of]
            score = max_sim(*lines)
        else:
            score = cosine(vectors[query], vectors[first + document])
        ids = one.prompt_token_ids + other.prompt_token_ids
        name, output = f"{one.request_id}_{other.request_id}", ScoringOutput(array("f", [score]))
        scores.append(PoolingRequestOutput(name, output, ids))
    return scores


class Vectors:
    """The methods of an `LLM` for vectors and scores. ValueError for bad input, and where the model has no such task."""

    def __init__(self, config: MeshConfig, background: Background) -> None:
        self._resolved, self._background, self._client = config.require_resolved(), background, background.client
        self.serves = self._resolved.pooling is not None
        self._processor: io_processors.IOProcessor | None = None
        if name := config.server.io_processor_plugin:
            self._processor = io_processors.make(name, config, os.environ)

    @property
    def _spec(self) -> PoolingSpec:
        if self._resolved.pooling is None:
            raise ValueError('the model gives text, and no vectors; make it with LLM(..., runner="pooling")')
        return self._resolved.pooling

    def encode(
        self,
        prompts: Any,
        pooling_params: ManyParams = None,
        *,
        use_tqdm: Bar = True,
        lora_request: None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        kind: type[PoolingOutput] = PoolingOutput,
    ) -> list[PoolingRequestOutput]:
        """See `LLM.encode`. tokenization_kwargs: add_special_tokens, truncate_prompt_tokens."""
        if isinstance(prompts, dict) and "data" in prompts:
            if self._processor is None:
                raise ValueError("data: make the LLM with io_processor_plugin=NAME")
            texts = io_processors.prompts_of(self._processor, prompts["data"], "")
            inputs = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in texts]
            options: Any = {"pooling_task": pooling_task, "tokenization_kwargs": tokenization_kwargs}
            vectors = [one.outputs.values for one in self.encode(inputs, pooling_params, use_tqdm=use_tqdm, **options)]
            return [PoolingRequestOutput("", io_processors.answer_of(self._processor, vectors, ""), [])]
        refuse(lora_request=lora_request)
        submits, pools = self._asked(prompts, pooling_params, pooling_task, tokenization_kwargs)
        found = self._run(submits, len(pools), use_tqdm)
        return [result_of(request, pool, kind) for request, pool in zip(found, pools, strict=True)]

    def begin(
        self, prompt: Any, params: PoolingParams | None, priority: int, tokenization_kwargs: Mapping[str, Any] | None
    ) -> "Future[PoolingRequestOutput]":
        """Asks for one prompt's vector, for somebody who does not wait here."""
        ((submit, request, _),), (pool,) = self._asked([prompt], params, None, tokenization_kwargs)

        async def answered() -> PoolingRequestOutput:
            asked = iter([Sent(replace(submit, priority=priority), request)])
            work = self._client.run(asked, None)
            (found,) = await unless_ended(self._background.supervisor, work)
            return result_of(found, pool, PoolingOutput)

        return self._background.start(answered())

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput]:
        refuse(lora_request=lora_request)
        if chat_template is not None:
            text = "pairs are put together by the tokenizer; write the texts as the model wants them"
            raise ValueError(f"chat_template: {text}")
        prompts, indices, first = self._pairs(data_1, data_2)
        pools, _ = self._pools(self._spec.scores_by, pooling_params, len(prompts), tokenization_kwargs)
        given = [Given(prompt, None) for prompt in prompts]
        found = self._run(self._submits(given, pools), len(prompts), use_tqdm)
        return scores_of(found, pools[0][0], indices, first)

    def _asked(
        self, prompts: Any, params: ManyParams, task: PoolingTask | None, tokenization_kwargs: Mapping[str, Any] | None
    ) -> tuple[Iterator[Sent], list[Pool]]:
        """What the mesh is asked for these prompts, and what is made of each."""
        items = many(prompts)
        pools, options = self._pools(task or self._spec.tasks[0], params, len(items), tokenization_kwargs)
        given = [of_generate(item, **options) for item in items]
        return self._submits(given, pools), [pool for pool, _ in pools]

    def _pools(
        self, task: PoolingTask, params: ManyParams, count: int, tokenization_kwargs: Mapping[str, Any] | None
    ) -> tuple[list[tuple[Pool, PoolingParams]], dict[str, Any]]:
        """The task of each prompt, and options for its tokens."""
        options, keep = of_tokenization(tokenization_kwargs)
        given = list(params) if isinstance(params, Sequence) else [params or PoolingParams()] * count
        if len(given) != count:
            raise ValueError(f"{count} prompts and {len(given)} pooling_params")
        if keep is not None:
            given = [dataclasses.replace(one, truncate_prompt_tokens=keep) for one in given]
        return [(self._pool(task, one), one) for one in given], options

    def _pool(self, task: PoolingTask, params: PoolingParams) -> Pool:
        """What a prompt asks for. ValueError."""
        spec = self._spec
        task = params.task or task
        if task not in spec.tasks:
            raise ValueError(f"the model does not support the task {task!r}; it has {', '.join(map(repr, spec.tasks))}")
        cut = params.dimensions
        if cut is not None:
            if not task.endswith("embed"):
                raise ValueError(f"dimensions: the task {task!r} has none")
            if not spec.matryoshka:
                raise ValueError("dimensions: the model does not support Matryoshka embeddings")
            allowed = spec.matryoshka_dimensions
            if not 1 <= cut <= spec.size or (allowed and cut not in allowed):
                raise ValueError(f"dimensions: the model supports {allowed or f'1 to {spec.size}'}, got {cut}")
        return spec.pool(task, activation=params.use_activation, dimensions=cut or 0)

    def _submits(self, given: Sequence[Given], pools: Sequence[tuple[Pool, PoolingParams]]) -> Iterator[Sent]:
        run = uuid.uuid4().hex
        for number, (given_prompt, (pool, params)) in enumerate(zip(given, pools, strict=True)):
            name, prompt, salt = f"{run}-{number}", given_prompt.prompt, given_prompt.cache_salt
            if given_prompt.media:
                raise ValueError("a prompt's 'multi_modal_data': vectors are made of texts, and of no images")
            submit = Submit(
                handles=(Handle(self._client.new_handle()),),
                request_ids=(name_of(name, 0),),
                prompt=prompt,
                sampling=SamplingParams(),
                text=self._text(params.truncate_prompt_tokens),
                max_tokens=1,
                want_ids=True,
                cache_salt=salt,
                arrival_s=time.time(),
                extras=(pool,),
            )
            ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
            yield Sent(submit, RequestOutput(name, None, ids, [CompletionOutput(0)]))

    def _text(self, keep: int | None) -> TextParams:
        if keep is None:
            return TextParams()
        most = self._resolved.max_model_len
        if keep == 0 or not -1 <= keep <= most:
            raise ValueError(f"truncate_prompt_tokens: must be -1, or 1 to {most}, got {keep}")
        return TextParams(truncate_prompt_tokens=most if keep < 0 else keep, truncation_side="right")

    def _pairs(self, first: Texts, second: Texts) -> tuple[list[Prompt], list[tuple[int, int]], int]:
        """The prompts of `LLM.score`, which of two texts go together, and how many come first."""
        queries, documents = ([one] if isinstance(one, str) else list(one) for one in (first, second))
        if not queries or not documents or len(queries) not in (1, len(documents)):
            raise ValueError("Input lengths must be either 1:1, 1:N or N:N")
        if not all(isinstance(text, str) for text in (*queries, *documents)):
            raise ValueError("score: texts are compared, and nothing else")
        indices = [(place if len(queries) > 1 else 0, place) for place in range(len(documents))]
        if self._spec.scores_by == "classify":
            if self._spec.size != 1:
                raise ValueError("score: the model has several labels; a classifier with one compares texts")
            joined = not self._resolved.spec.encoder_only
            return [PairPrompt(queries[query], documents[place], joined) for query, place in indices], indices, 0
        return [TextPrompt(text) for text in (*queries, *documents)], indices, len(queries)

    def _run(self, submits: Iterator[Sent], count: int, use_tqdm: Bar) -> list[RequestOutput]:
        with progress_bar(use_tqdm, count, "Pooling") as bar:
            return self._background.ask(self._client.run(submits, bar))
