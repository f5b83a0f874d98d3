"""The Python API: the same mesh without HTTP.
`LLM` starts the processes as `meshlm serve` does, less the frontends, and takes a frontend's place itself, in a background thread
(background.py). The children are programs of their own, so a script needs no `__main__` guard.
"""

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from meshlm.protocol.edges.text import Prompt, TextPrompt, TokenPrompt
from meshlm.protocol.extras import Extras
from meshlm.protocol.media import Modality
from meshlm.protocol.wire.columns import ints
from meshlm.runtime.errors import RequestError
from meshlm.supervisor.api import media, vectors
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.api.background import Background, Bar, Enqueued, finished, progress_bar
from meshlm.supervisor.api.beams import BeamSearchOutput, BeamSearchParams, find, sequence_of
from meshlm.supervisor.api.lora import LoRARequest, LoRARequests, extras_of
from meshlm.supervisor.api.metrics import Metric
from meshlm.supervisor.api.offline_prompts import (
    Asked,
    Given,
    Prompts,
    Sizes,
    Texts,
    many,
    of_generate,
    of_tokenization,
)
from meshlm.supervisor.api.operations import Operator
from meshlm.supervisor.api.outputs import RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams
from meshlm.supervisor.api.submits import Params, Submits
from meshlm.supervisor.api.tokenizer import Tokenizer, chat_prompt
from meshlm.supervisor.api.weights import NO_FUNCTIONS
from meshlm.supervisor.errors import raised_as
from meshlm.supervisor.settings import flags, node_rules, resolve, vllm_env

if TYPE_CHECKING:
    from meshlm.supervisor.api.arguments import EngineArgs

Messages = Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]]
# Work comes at once, nothing idles then, and nobody reads along.
OFFLINE = {
    "standby_roles": ["none"],
    "orphan_grace": 0,
    "cudagraph_capture": "start",
    "prefill_pace": "full",
    "max_waiting": 1 << 30,
}


class LLM:
    """A model in a mesh of its own. Keyword arguments are the flags of `meshlm serve`, with underscores.

    The processes end with `shutdown`, with the last reference to the object, or with the program."""

    _settings: ClassVar[dict[str, Any]] = OFFLINE  # that hold unless others are given

    def __init__(self, model: str = "", **settings: Any) -> None:
        given = {**self._settings, **settings_of(settings), "model": model}
        config = flags.build(given, None, vllm_env.settings_of(os.environ))
        if idle := vllm_env.without_effect(os.environ):
            warnings.warn(idle, stacklevel=2)
        node_rules.check_alone(config)
        self._background = resolve.fitting(lambda at_most: Background(resolve.for_mesh(config, at_most)))
        self._config, self._client = self._background.config, self._background.client
        self._resolved = self._config.require_resolved()
        self._submits = Submits(self._config, self._client)
        self._enqueued = Enqueued(self._background)
        self._operator = Operator(self._config, self._background.supervisor)
        self._vectors = vectors.Vectors(self._config, self._background)
        self._finalizer = weakref.finalize(self, self._background.stop)

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "LLM":
        """With the settings of an EngineArgs."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, which may have a "cache_salt",
        and "multi_modal_data": {"image": Pillow's image, or a list, "video": frames as an array or a list of images, (frames, what is
        told of them), or a list of these, "audio": an array of samples, (array, rate), or a list}, in the order of the model's
        placeholders in the text.
        Results in the order of the prompts. An output ends where the context does. Without sampling_params the model's own are taken.
        ValueError for bad input."""
        asked = self._adapted(self._asked(prompts, tokenization_kwargs, mm_processor_kwargs), lora_request)
        return self._run(asked, sampling_params, use_tqdm, priority)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: Bar = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Begin what `generate` does, and do not wait: the requests' ids. `wait_for_completion` has the results. use_tqdm: ignored."""
        asked = self._adapted(self._asked(prompts, tokenization_kwargs, mm_processor_kwargs), lora_request)
        return self._begin(asked, sampling_params, priority)

    def enqueue_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[str]:
        """The same with conversations; options are those of `chat` for its template."""
        options["mm_processor_kwargs"] = mm_processor_kwargs
        asked = self._adapted(self._conversations(messages, **options), lora_request)
        return self._begin(asked, sampling_params, priority)

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: Bar = True
    ) -> list[RequestOutput]:
        """The results of all that was enqueued and not waited for yet, in that order. ValueError with the first refusal, and for an
        output_type that no text is."""
        types = output_type if isinstance(output_type, tuple) else (output_type or RequestOutput,)
        if RequestOutput not in types:
            raise ValueError("output_type: what is enqueued gives a RequestOutput")
        return self._enqueued.wait(use_tqdm)

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
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
        template = (chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message)
        form, kwargs = chat_template_content_format, mm_processor_kwargs
        asked = self._conversations(messages, form, tokenization_kwargs, kwargs, tools, *template)
        return self._run(self._adapted(asked, lora_request), sampling_params, use_tqdm, None)

    def _adapted(self, asked: Asked, lora_request: LoRARequests) -> Asked:
        """The prompts with the adapters that are to answer them."""
        return asked.with_extras(extras_of(lora_request, asked.num, self._config)) if lora_request else asked

    def _asked(
        self,
        prompts: Prompts,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Asked:
        options, keep = of_tokenization(tokenization_kwargs)
        options["mm_processor_kwargs"] = self.checked_kwargs(mm_processor_kwargs)
        items = many(prompts)
        made = (of_generate(item, **options, sizes=self.embeds_sizes, hears=self.hears) for item in items)
        return Asked(made, len(items), keep)

    def _conversations(
        self,
        messages: Messages,
        chat_template_content_format: str = "auto",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Asked:
        if chat_template_content_format not in ("auto", self._config.model.chat_template_content_format):
            raise ValueError("chat_template_content_format: give it to LLM(...); it holds for all conversations")
        options, keep = of_tokenization(tokenization_kwargs)
        several = all(isinstance(one, list | tuple) for one in messages)
        conversations: list[Any] = list(messages) if several else [list(messages)]
        template = (tools, chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message)
        kwargs = media.kwargs_json(self.checked_kwargs(mm_processor_kwargs))

        def given(messages: list[dict[str, Any]]) -> Given:
            inputs: media.MediaInputs = ()
            if (spec := self._resolved.spec.media) is not None:
                with raised_as(ValueError, RequestError):
                    messages, inputs = media.of_messages(messages, kwargs, spec)
            return Given(chat_prompt(messages, *template, **options, media=bool(inputs)), None, media=inputs)

        return Asked((given(list(one)) for one in conversations), len(conversations), keep)

    def checked_kwargs(self, mm_processor_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """ValueError where there is no processor of media."""
        if mm_processor_kwargs and self._resolved.spec.media is None:
            raise ValueError("mm_processor_kwargs: this model has no vision")
        return mm_processor_kwargs

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences behind each prompt. `concurrency_limit`: prompts that are searched at the same time."""
        (adapter,) = extras_of(lora_request, 1, self._config)
        items = many(prompts)
        given = [of_generate(item, hears=self.hears) for item in items]
        if any(one.media for one in given):
            raise ValueError("a prompt's 'multi_modal_data': images and clips do not go with beam search")
        texts = [one.prompt for one in given if not isinstance(one.prompt, TokenPrompt)]
        tokenized = iter(self._background.ask(self._client.tokenize(texts)))
        asked: list[tuple[Any, dict[str, Any]]] = []
        for item, one in zip(items, given, strict=True):
            ids = ints(one.prompt.token_ids) if isinstance(one.prompt, TokenPrompt) else next(tokenized)
            if not 1 <= len(ids) < self.max_model_len:
                raise ValueError(f"prompt: {len(ids)} tokens; the context holds {self.max_model_len} with the output")
            salt = {"cache_salt": one.cache_salt} if one.cache_salt else {}
            asked.append((item, {"prompt_token_ids": ids, **salt}))
        decode = self.get_tokenizer().decode
        size, found = concurrency_limit or max(1, len(asked)), list[BeamSearchOutput]()
        for begin in tqdm(range(0, len(asked), size), desc="Beam search", disable=not use_tqdm):
            group = asked[begin : begin + size]
            best = self._background.ask(find(group, params, partial(self._step, adapter), self._resolved))
            found += [
                BeamSearchOutput([sequence_of(given, prompt, beam, decode) for beam in beams])
                for (given, prompt), beams in zip(group, best, strict=True)
            ]
        return found

    async def _step(self, extras: Extras, prompts: list[dict[str, Any]], params: SamplingParams) -> list[RequestOutput]:
        """The outputs of these prompts, in the mesh's loop."""
        asked = self._asked(prompts, None).with_extras([extras] * len(prompts))
        each, ranks = self._submits.checked(params, asked.num, None, asked.keep)
        submits = self._submits.of(asked.prompts, each, ranks)
        return finished(await self._client.run(submits, tqdm(disable=True)), each)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._resolved.spec.vocab_size

    @property
    def embeds_sizes(self) -> Sizes | None:
        """The sizes of a prompt of vectors, where it may be one."""
        takes, spec = self._config.server.enable_prompt_embeds, self._resolved.spec
        return (spec.hidden_size, spec.vocab_size) if takes else None

    @property
    def hears(self) -> bool:
        """Whether prompts may have clips among their text."""
        media = self._resolved.spec.media
        return media is not None and Modality.AUDIO in media.modalities

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together are at most this."""
        return self._resolved.max_model_len

    def encode(self, prompts: Prompts, pooling_params: vectors.ManyParams = None, **options: Any) -> list[Any]:
        """With runner="pooling" what `pooling_task` asks for, as PoolingRequestOutputs. Else token ids of texts, list[list[int]]."""
        if self._vectors.serves:
            return self._vectors.encode(prompts, pooling_params, **options)
        if pooling_params is not None or options:
            raise ValueError('pooling_task: the model gives text; make it with LLM(..., runner="pooling")')
        return self._background.ask(self._client.tokenize([TextPrompt(str(text)) for text in prompts]))

    def embed(self, prompts: Prompts, **options: Any) -> list[vectors.PoolingRequestOutput]:
        """A vector of each prompt: `outputs.embedding`. Options: see `Vectors.encode`."""
        return self._vectors.encode(prompts, pooling_task="embed", kind=vectors.EmbeddingOutput, **options)

    def classify(self, prompts: Prompts, **options: Any) -> list[vectors.PoolingRequestOutput]:
        """The likelihoods of each prompt's classes: `outputs.probs`."""
        return self._vectors.encode(prompts, pooling_task="classify", kind=vectors.ClassificationOutput, **options)

    def reward(self, prompts: Prompts, **options: Any) -> list[vectors.PoolingRequestOutput]:
        """The scores of each prompt's tokens: `outputs.data`."""
        return self._vectors.encode(prompts, pooling_task="token_classify", **options)

    def score(self, data_1: Texts, data_2: Texts, /, **options: Any) -> list[vectors.PoolingRequestOutput]:
        """How well texts go with others, one with many or pair by pair: `outputs.score`."""
        return self._vectors.score(data_1, data_2, **options)

    def get_tokenizer(self) -> Tokenizer:
        """The mesh's tokenizer, with its chat template."""

        def ids(prompt: Prompt) -> list[int]:
            (found,) = self._background.ask(self._client.tokenize([prompt]))
            return found

        def text(token_ids: Sequence[int]) -> str:
            return self._background.ask(self._client.detokenize(token_ids))

        return Tokenizer(ids, text, self.vocab_size)

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the model's generation_config.json."""
        return self._submits.default

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of workers, or of one data-parallel rank's."""
        parallel = self._config.parallel
        of_rank = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return of_rank * parallel.data_parallel_size if include_dp else of_rank

    def start_profile(self) -> None:
        """Begin a profiler trace in every worker; needs `profiler_dir`. ValueError says why it cannot."""
        self._background.ask(self._operator.profile(True))

    def stop_profile(self) -> tuple[str, ...]:
        """End the trace: the files that were written, one a worker."""
        return self._background.ask(self._operator.profile(False))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Later requests find nothing of what is computed now. False while requests run that are not to be computed anew."""
        return self._background.ask(self._operator.reset_prefix_cache(reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory of weights and KV cache back until `wake_up`; needs `enable_sleep_mode`. level 1: weights go to the
        host's memory; 2: they are dropped, and loaded again; 0: no step is computed, and all memory stays. mode: "abort" or "keep" what
        other threads have running. ValueError says why it cannot."""
        self._background.ask(self._operator.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have that memory again: all, or of "weights" or "kv_cache" alone; with both, steps are computed."""
        self._background.ask(self._operator.wake_up(tags))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a method of `worker_extension_cls` gives, in the order of the workers. Arguments and results are values of JSON; other
        results come as text. timeout: in seconds. ValueError says what went wrong."""
        return self._background.ask(self._operator.call_workers(method, timeout, args, kwargs))

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Say how weights will come, as POST /init_weight_transfer_engine; needs `weight_transfer_config`, but for folders."""
        self._background.ask(self._operator.weights.join(request))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update. ValueError while another one goes on."""
        self._background.ask(self._operator.weights.begin(is_checkpoint_format))

    def update_weights(self, request: Any) -> None:
        """Receive tensors, or check a folder; nothing changes yet. ValueError says why not."""
        self._background.ask(self._operator.weights.update(request))

    def finish_weight_update(self, weight_version: str = "", keep_kv: bool = False, abort: bool = False) -> None:
        """Take what came, under this name. keep_kv: what runs goes on with its KV. abort: forget it. ValueError says why not."""
        self._background.ask(self._operator.weights.finish(weight_version, keep_kv, abort))

    def apply_model(self, func: Any) -> None:
        """ValueError: functions are not sent to workers; it says what to do."""
        raise ValueError(NO_FUNCTIONS)

    def get_metrics(self) -> list[Metric]:
        """What ranks are at and what sequences took that have ended, under names of /metrics, in vLLM's classes (metrics.py)."""
        return self._background.ask(self._client.metrics(self._resolved.served_names[0]))

    def shutdown(self) -> None:
        """End all processes. RuntimeError from any call afterwards, but this one."""
        self._finalizer()

    def _run(self, asked: Asked, params: Params, use_tqdm: Bar, priority: Sequence[int] | None) -> list[RequestOutput]:
        """Prompts are made one by one, in the loop: the first is on its way while the others are not."""
        each, ranks = self._submits.checked(params, asked.num, priority, asked.keep)
        submits = self._submits.of(asked.prompts, each, ranks)
        with progress_bar(use_tqdm, sum(one.n for one in each), "Generating") as bar:
            return finished(self._background.ask(self._client.run(submits, bar)), each)

    def _begin(self, asked: Asked, params: Params, priority: Sequence[int] | None) -> list[str]:
        """All prompts are made before any is sent, so what is wrong with one is raised here."""
        each, ranks = self._submits.checked(params, asked.num, priority, asked.keep)
        return self._enqueued.add(list(self._submits.of(asked.prompts, each, ranks)), each)
