"""What LLM and AsyncLLM send for prompts: their settings, checked, and a message for each. No I/O; ValueError for bad input."""

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshlm.protocol.audio import WHISPER_TIMESTAMPS
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import ChatPrompt, Prompt, Submit, TokenPrompt, media_of
from meshlm.protocol.extras import find_extra
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.wire.columns import ints
from meshlm.runtime import logits_processors, tensor_files
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.media_parts import check_count, check_modality
from meshlm.supervisor.api.client import Client, Sent, name_of
from meshlm.supervisor.api.media import MediaInputs
from meshlm.supervisor.api.offline_prompts import Given
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams, check_embeds
from meshlm.supervisor.errors import raised_as

Params = SamplingParams | Sequence[SamplingParams] | None


class Submits:
    """Of one mesh. The prompts' seeds are drawn here, in their order."""

    def __init__(self, config: MeshConfig, client: Client) -> None:
        self._config, self._resolved, self._client = config, config.require_resolved(), client
        self._vocab_size = self._resolved.spec.vocab_size
        self._draws = random.Random(config.model.seed or 0)  # of the seeds of prompts without one

    @property
    def default(self) -> SamplingParams:
        """The settings that the model's own generation_config.json has."""
        return SamplingParams(**self._resolved.generation_defaults)  # type: ignore[arg-type]

    def checked(
        self, params: Params, count: int, priority: Sequence[int] | None, keep: int | None
    ) -> tuple[list[SamplingParams], list[int]]:
        """The settings and the priority of each prompt. ValueError."""
        if self._resolved.pooling is not None:
            methods = "embed, classify, score and encode are its methods"
            raise ValueError(f"the model gives vectors, and no text (runner); {methods}")
        params = self.default if params is None else params
        each = [params] * count if not isinstance(params, Sequence) else list(params)
        if len(each) != count:
            raise ValueError(f"{count} prompts and {len(each)} sampling_params")
        ranks = [0] * count if priority is None else list(priority)
        if len(ranks) != count:
            raise ValueError(f"{count} prompts and {len(ranks)} of priority")
        check_priority(any(ranks), self._config)
        if keep is not None:
            each = [replace(one, truncate_prompt_tokens=keep) for one in each]
        for one in {id(one): one for one in each}.values():
            one.check(self._vocab_size)
            if one.deterministic and not self._config.worker.deterministic:
                raise ValueError("SamplingParams.deterministic: the engine was made without LLM(deterministic=True)")
            one.check_reasoning(self._config.server.reasoning_parser)
            one.drafting(self._resolved.num_speculative_tokens)
            self._check_processors(one)
        return each, ranks

    def _check_processors(self, params: SamplingParams) -> None:
        """Asks the logits processors whether they take these. ValueError."""
        names = self._resolved.logits_processors
        own = {WHISPER_TIMESTAMPS} if self._resolved.speech is not None else set[str]()
        if (params.extra_args or {}).keys() - own and not names:
            raise ValueError("SamplingParams.extra_args: there are no logits_processors that would read them")
        if names:
            try:
                logits_processors.check(logits_processors.loaded(names), params.wire((), self._vocab_size, 0))
            except (RequestError, logits_processors.ProcessorError) as error:
                raise ValueError(str(error).replace("vllm_xargs", "SamplingParams.extra_args")) from None

    def of(
        self, prompts: Iterator[Given], each: Sequence[SamplingParams], ranks: Sequence[int], dp_rank: int = -1
    ) -> Iterator[Sent]:
        """What is sent for each prompt, made when it is asked for, and what its tokens go to."""
        run, eos, server = uuid.uuid4().hex, self._resolved.eos_token_ids, self._config.server
        constraints, most_drafted = server.structured_outputs, self._resolved.num_speculative_tokens
        for number, (given, params, priority) in enumerate(zip(prompts, each, ranks, strict=True)):
            name, prompt = f"{run}-{number}", given.prompt
            self._check_media(given.media)
            if (vectors := find_extra(media_of(prompt), PromptEmbeds)) is not None:
                prompt = tensor_files.prompt_of(tensor_files.kept(vectors, params.truncate_prompt_tokens or 0, "left"))
                check_embeds(params)
            submit = Submit(
                handles=tuple(self._client.new_handle() for _ in range(params.n)),
                request_ids=tuple(name_of(name, index) for index in range(params.n)),
                prompt=prompt,
                sampling=params.wire(eos, self._vocab_size, self._draws.getrandbits(63)),
                extras=(
                    *params.extras(constraints, server.reasoning_parser),
                    *params.drafting(most_drafted),
                    *given.extras,
                ),
                text=params.text(),
                max_tokens=params.max_tokens,
                cap_max_tokens=True,
                want_ids=bool(given.media) or _wants_ids(prompt, params),
                want_text=isinstance(prompt, ChatPrompt),
                priority=priority,
                cache_salt=given.cache_salt,
                arrival_s=time.time(),
                dp_rank=dp_rank,
            )
            ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
            outputs = [CompletionOutput(index) for index in range(params.n)]
            yield Sent(submit, RequestOutput(name, given.text, ids, outputs), given.media)

    def _check_media(self, media: MediaInputs) -> None:
        """ValueError where the model takes none of the kind, or not so many."""
        if not media:
            return
        param = media[0].source.param
        if (spec := self._resolved.spec.media) is None:
            raise ValueError(f"{param}: this model has no vision")
        with raised_as(ValueError, RequestError):
            for one in media:
                check_modality(one.source.modality, spec, one.source.where)
            check_count([one.source for one in media], self._config.media, param)


def _wants_ids(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether the prompt's token ids are not known here, and are there."""
    if find_extra(media_of(prompt), PromptEmbeds):
        return False
    return not isinstance(prompt, TokenPrompt) or bool(params.truncate_prompt_tokens)


def check_priority(is_asked: bool, config: MeshConfig) -> None:
    """ValueError for a priority that nobody would heed."""
    if is_asked and config.scheduler.scheduling_policy != "priority":
        raise ValueError('priority: requests wait in order of arrival (scheduling_policy="fcfs")')
