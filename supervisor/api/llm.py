"""The Python API: the same mesh without HTTP.

`LLM` starts the processes as `meshlm serve` does, less the frontends, and takes a frontend's place itself (client.py), in a
background thread (background.py). The children are programs of their own, so a script needs no `__main__` guard.
"""

import os
import random
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from meshlm.protocol.columns import ints
from meshlm.protocol.operations import Profile, ResetPrefixCache
from meshlm.protocol.text_edge import ChatPrompt, EmbedsPrompt, Prompt, Submit, TextPrompt, TokenPrompt
from meshlm.runtime import logits_processors, tensor_files
from meshlm.runtime.errors import RequestError
from meshlm.supervisor.api import rpc
from meshlm.supervisor.api.arguments import refuse, settings_of
from meshlm.supervisor.api.background import Background
from meshlm.supervisor.api.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, search
from meshlm.supervisor.api.client import name_of
from meshlm.supervisor.api.offline_prompts import Given, OnePrompt, Sizes, many, of_generate, of_tokenization
from meshlm.supervisor.api.outputs import CompletionOutput, Logprob, RequestOutput
from meshlm.supervisor.api.sampling import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
    check_embeds,
)
from meshlm.supervisor.api.sleep import Sleeper
from meshlm.supervisor.api.tokenizer import Tokenizer, chat_prompt
from meshlm.supervisor.api.vectors import PoolingParams, PoolingRequestOutput, Vectors
from meshlm.supervisor.settings import flags, layout, resolve, vllm_env

if TYPE_CHECKING:
    from meshlm.supervisor.api.engine_args import EngineArgs

# Work comes at once, nothing idles then, and nobody reads along.
OFFLINE = {"standby_roles": ["none"], "cudagraph_capture": "start", "prefill_pace": "full", "max_waiting": 1 << 30}


class LLM:
    """A model in a mesh of its own. Keyword arguments are the flags of `meshlm serve`, with underscores.

    The processes end with `shutdown`, with the last reference to the object, or with the program.
    """

    _settings: ClassVar[dict[str, Any]] = OFFLINE  # that hold unless others are given

    def __init__(self, model: str = "", **settings: Any) -> None:
        given = {**self._settings, **settings_of(settings), "model": model}
        config = flags.build(given, None, vllm_env.settings_of(os.environ))
        if idle := vllm_env.without_effect(os.environ):
            warnings.warn(idle, stacklevel=2)
        layout.check_alone(config)
        self._config = resolve.resolve(config)
        self._draws = random.Random(config.model.seed or 0)  # of the seeds of prompts without one
        self._background = Background(self._config)
        self._supervisor, self._client = self._background.supervisor, self._background.client
        self._sleeper = Sleeper(self._config, self._supervisor)
        self._vectors = Vectors(self._config, self._background)
        self._finalizer = weakref.finalize(self, self._background.stop)

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "LLM":
        """With the settings of an EngineArgs."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, which may have a "cache_salt".
        Results in the order of the prompts. An output ends where the context does. Without sampling_params the model's own are taken.
        ValueError for bad input."""
        refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        options = of_tokenization(tokenization_kwargs)
        keep = options.pop("truncate_prompt_tokens", None)
        items = many(prompts)
        made = (of_generate(item, **options, sizes=self.embeds_sizes) for item in items)
        return self._run(made, len(items), sampling_params, use_tqdm, priority, keep)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template. An output ends where the context does."""
        refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        if chat_template_content_format not in ("auto", self._config.model.chat_template_content_format):
            raise ValueError("chat_template_content_format: give it to LLM(...); it holds for all conversations")
        options = of_tokenization(tokenization_kwargs)
        keep = options.pop("truncate_prompt_tokens", None)
        several = all(isinstance(one, list | tuple) for one in messages)
        conversations: list[Any] = list(messages) if several else [list(messages)]
        made = (
            Given(
                chat_prompt(
                    list(conversation),
                    tools,
                    chat_template,
                    chat_template_kwargs,
                    add_generation_prompt,
                    continue_final_message,
                    **options,
                ),
                None,
            )
            for conversation in conversations
        )
        return self._run(made, len(conversations), sampling_params, use_tqdm, None, keep)

    def beam_search(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences behind each prompt. `concurrency_limit`: prompts that are searched at the same time."""
        refuse(lora_request=lora_request)
        items = many(prompts)
        given = [of_generate(item) for item in items]
        texts = [one.prompt for one in given if not isinstance(one.prompt, TokenPrompt)]
        tokenized = iter(self._background.ask(self._client.tokenize(texts)))
        asked: list[tuple[Any, dict[str, Any]]] = []
        for item, one in zip(items, given, strict=True):
            ids = ints(one.prompt.token_ids) if isinstance(one.prompt, TokenPrompt) else next(tokenized)
            if not 1 <= len(ids) < self.max_model_len:
                raise ValueError(f"prompt: {len(ids)} tokens; the context holds {self.max_model_len} with the output")
            asked.append(
                (item, {"prompt_token_ids": ids, **({"cache_salt": one.cache_salt} if one.cache_salt else {})})
            )
        assert self._config.resolved is not None
        size, found = concurrency_limit or max(1, len(asked)), list[BeamSearchOutput]()
        for begin in tqdm(range(0, len(asked), size), desc="Beam search", disable=not use_tqdm):
            found += search(
                asked[begin : begin + size],
                params,
                lambda several, one: self.generate(several, one, use_tqdm=False),
                self._config.resolved.eos_token_ids,
                self.vocab_size,
                self.max_model_len,
                self.get_tokenizer().decode,
            )
        return found

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        assert self._config.resolved is not None
        return self._config.resolved.spec.vocab_size

    @property
    def embeds_sizes(self) -> Sizes | None:
        """The sizes of a prompt of vectors, where it may be one."""
        resolved = self._config.resolved
        assert resolved is not None
        takes = self._config.server.enable_prompt_embeds
        return Sizes(resolved.spec.hidden_size, resolved.spec.vocab_size) if takes else None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together are at most this."""
        assert self._config.resolved is not None
        return self._config.resolved.max_model_len

    def encode(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[Any]:
        """With runner="pooling" what `pooling_task` asks for, as PoolingRequestOutputs. Else token ids of texts, list[list[int]]."""
        if self._vectors.serves:
            return self._vectors.encode(prompts, pooling_params, **options)
        if pooling_params is not None or options:
            raise ValueError('pooling_task: the model gives text; make it with LLM(..., runner="pooling")')
        return self._background.ask(self._client.tokenize([TextPrompt(str(text)) for text in prompts]))

    def embed(self, prompts: OnePrompt | Sequence[OnePrompt], **options: Any) -> list[PoolingRequestOutput]:
        """A vector of each prompt: `outputs.embedding`. Options: see `Vectors.encode`."""
        return self._vectors.embed(prompts, **options)

    def classify(self, prompts: OnePrompt | Sequence[OnePrompt], **options: Any) -> list[PoolingRequestOutput]:
        """The likelihoods of each prompt's classes: `outputs.probs`."""
        return self._vectors.classify(prompts, **options)

    def reward(self, prompts: OnePrompt | Sequence[OnePrompt], **options: Any) -> list[PoolingRequestOutput]:
        """The scores of each prompt's tokens: `outputs.data`."""
        return self._vectors.reward(prompts, **options)

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, **options: Any
    ) -> list[PoolingRequestOutput]:
        """How well texts go with others, one with many or pair by pair: `outputs.score`."""
        return self._vectors.score(data_1, data_2, **options)

    def get_tokenizer(self) -> Tokenizer:
        """The mesh's tokenizer, with its chat template."""

        def ids(prompt: Prompt) -> list[int]:
            (found,) = self._background.ask(self._client.tokenize([prompt]))
            return found

        return Tokenizer(
            ids, lambda token_ids: self._background.ask(self._client.detokenize(token_ids)), self.vocab_size
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the model's generation_config.json."""
        assert self._config.resolved is not None
        return SamplingParams(**self._config.resolved.generation_defaults)  # type: ignore[arg-type]

    def start_profile(self) -> None:
        """Begin a profiler trace in every worker; needs `profiler_dir`. ValueError says why it cannot."""
        self._profile(start=True)

    def stop_profile(self) -> tuple[str, ...]:
        """End the trace: the files that were written, one a worker."""
        return self._profile(start=False)

    def _profile(self, *, start: bool) -> tuple[str, ...]:
        answer = self._background.ask(self._supervisor.operate(Profile(start)))
        if answer.error:
            raise ValueError(answer.error)
        return answer.paths

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Later requests find nothing of what is computed now. False while requests run that are not to be computed anew."""
        return not self._background.ask(self._supervisor.operate(ResetPrefixCache(reset_running_requests))).error

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory of weights and KV cache back until `wake_up`; needs `enable_sleep_mode`. level 1: weights go to the
        host's memory; 2: they are dropped, and loaded again; 0: no step is computed, and all memory stays. mode: "abort" or "keep" what
        other threads have running. ValueError says why it cannot."""
        self._background.ask(self._sleeper.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have that memory again: all, or of "weights" or "kv_cache" alone; with both, steps are computed."""
        self._background.ask(self._sleeper.wake_up(tags))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a method of `worker_extension_cls` gives, in the order of the workers. Arguments and results are values of JSON; other
        results come as text. timeout: in seconds. ValueError says what went wrong."""
        return self._background.ask(rpc.call(self._supervisor, method, timeout, args, kwargs))

    def shutdown(self) -> None:
        """End all processes. RuntimeError from any call afterwards, but this one."""
        self._finalizer()

    def _run(
        self,
        prompts: Iterator[Given],
        count: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        keep: int | None,
    ) -> list[RequestOutput]:
        """`prompts` are made one by one, in the loop: the first is on its way while the others are not. `keep`: truncate each to so
        many tokens."""
        each, ranks = self._checked(params, count, priority, keep)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        total = sum(one.n for one in each)
        with make_bar(total=total, desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as bar:
            found = self._background.ask(self._client.run(self._submits(prompts, each, ranks), bar))
        for request, one in zip(found, each, strict=True):
            if not one.detokenize:
                for output in request.outputs:
                    output.text = ""
        return found

    def _checked(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        priority: Sequence[int] | None,
        keep: int | None,
    ) -> tuple[list[SamplingParams], list[int]]:
        """The settings and the priority of each prompt. ValueError."""
        if self._config.resolved is not None and self._config.resolved.pooling is not None:
            raise ValueError(
                "the model gives vectors, and no text (runner); embed, classify, score and encode are its methods"
            )
        params = self.get_default_sampling_params() if params is None else params
        each = [params] * count if not isinstance(params, Sequence) else list(params)
        if len(each) != count:
            raise ValueError(f"{count} prompts and {len(each)} sampling_params")
        ranks = [0] * count if priority is None else list(priority)
        if len(ranks) != count:
            raise ValueError(f"{count} prompts and {len(ranks)} of priority")
        if any(ranks) and self._config.scheduler.scheduling_policy != "priority":
            raise ValueError('priority: requests wait in order of arrival (scheduling_policy="fcfs")')
        if keep is not None:
            each = [replace(one, truncate_prompt_tokens=keep) for one in each]
        for one in {id(one): one for one in each}.values():
            one.check(self.vocab_size)
            one.check_reasoning(self._config.server.reasoning_parser)
            self._check_processors(one)
        return each, ranks

    def _check_processors(self, params: SamplingParams) -> None:
        """Asks the logits processors whether they take these. ValueError."""
        assert self._config.resolved is not None
        names = self._config.resolved.logits_processors
        if params.extra_args and not names:
            raise ValueError("SamplingParams.extra_args: there are no logits_processors that would read them")
        if names:
            try:
                logits_processors.check(logits_processors.loaded(names), params.wire((), self.vocab_size, 0))
            except (RequestError, logits_processors.ProcessorError) as error:
                raise ValueError(str(error).replace("vllm_xargs", "SamplingParams.extra_args")) from None

    def _submits(
        self, prompts: Iterator[Given], each: list[SamplingParams], ranks: list[int], dp_rank: int = -1
    ) -> Iterator[tuple[Submit, RequestOutput]]:
        assert self._config.resolved is not None
        eos, run = self._config.resolved.eos_token_ids, uuid.uuid4().hex
        server = self._config.server
        constraints = server.structured_outputs
        for number, (given, params, priority) in enumerate(zip(prompts, each, ranks, strict=True)):
            name, prompt = f"{run}-{number}", given.prompt
            if isinstance(prompt, EmbedsPrompt):
                prompt = tensor_files.kept(prompt, params.truncate_prompt_tokens or 0, "left")
                check_embeds(params)
            submit = Submit(
                handles=tuple(self._client.new_handle() for _ in range(params.n)),
                request_ids=tuple(name_of(name, index) for index in range(params.n)),
                prompt=prompt,
                sampling=params.wire(
                    eos, self.vocab_size, self._draws.getrandbits(63), constraints, server.reasoning_parser
                ),
                text=params.text(),
                max_tokens=params.max_tokens,
                cap_max_tokens=True,
                want_ids=_wants_ids(prompt, params),
                want_text=isinstance(prompt, ChatPrompt),
                priority=priority,
                cache_salt=given.cache_salt,
                arrival_s=time.time(),
                dp_rank=dp_rank,
            )
            ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
            yield submit, RequestOutput(name, given.text, ids, [CompletionOutput(index) for index in range(params.n)])


def _wants_ids(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether the prompt's token ids are not known here, and are there."""
    if isinstance(prompt, EmbedsPrompt):
        return False
    return not isinstance(prompt, TokenPrompt) or bool(params.truncate_prompt_tokens)


__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
