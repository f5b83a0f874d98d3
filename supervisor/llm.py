"""The Python API: the same mesh without HTTP.

`LLM` starts the processes as `meshlm serve` does, less the frontends, and takes a frontend's place itself (client.py), in a
background thread (background.py). The children are programs of their own, so a script needs no `__main__` guard.
"""

import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.text_edge import ChatPrompt, Prompt, Submit, TextPrompt, TokenPrompt
from meshlm.supervisor import flags, layout, resolve
from meshlm.supervisor.arguments import settings_of
from meshlm.supervisor.background import Background
from meshlm.supervisor.client import name_of
from meshlm.supervisor.outputs import CompletionOutput, Logprob, RequestOutput
from meshlm.supervisor.sampling import SamplingParams
from meshlm.supervisor.tokenizer import Tokenizer, chat_prompt

OnePrompt = str | Sequence[int] | dict[str, Any]
# Work comes at once, nothing idles then, and nobody reads along.
OFFLINE = {"standby_roles": ["none"], "cudagraph_capture": "start", "prefill_pace": "full", "max_waiting": 1 << 30}


class LLM:
    """A model in a mesh of its own. Keyword arguments are the flags of `meshlm serve`, with underscores.

    The processes end with `shutdown`, with the last reference to the object, or with the program.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        given = {**OFFLINE, **settings_of(settings), "model": model}
        config = flags.build(given, None)
        layout.check_alone(config)
        self._config = resolve.resolve(config)
        self._background = Background(self._config)
        self._supervisor, self._client = self._background.supervisor, self._background.client
        self._finalizer = weakref.finalize(self, self._background.stop)

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}. Results in the order of the
        prompts. Without sampling_params the model's own are taken. ValueError for bad input."""
        single = isinstance(prompts, str | dict) or (bool(prompts) and isinstance(prompts[0], int))
        items: list[Any] = [prompts] if single else list(prompts)
        return self._run((_prompt(item) for item in items), len(items), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template."""
        many = bool(messages) and isinstance(messages[0], list)
        conversations: list[Any] = list(messages) if many else [messages]
        made = (
            chat_prompt(
                conversation, tools, chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message
            )
            for conversation in conversations
        )
        return self._run(made, len(conversations), sampling_params, use_tqdm)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        assert self._config.resolved is not None
        return self._config.resolved.spec.vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, by the mesh's own tokenizer."""
        return self._background.ask(self._client.tokenize([TextPrompt(text) for text in texts]))

    def get_tokenizer(self) -> Tokenizer:
        """The mesh's tokenizer, with its chat template."""

        def ids(prompt: Prompt) -> list[int]:
            (found,) = self._background.ask(self._client.tokenize([prompt]))
            return found

        return Tokenizer(
            ids, lambda token_ids: self._background.ask(self._client.detokenize(token_ids)), self.vocab_size
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """With the defaults of the model's generation_config.json."""
        assert self._config.resolved is not None
        return SamplingParams(**self._config.resolved.generation_defaults)  # type: ignore[arg-type]

    def start_profile(self) -> None:
        """Begin a profiler trace in every worker; needs `profiler_dir`. ValueError says why it cannot."""
        self._profile(start=True)

    def stop_profile(self) -> tuple[str, ...]:
        """End the trace: the files that were written, one a worker."""
        return self._profile(start=False)

    def _profile(self, *, start: bool) -> tuple[str, ...]:
        answer = self._background.ask(self._supervisor.profile(start=start))
        if answer.error:
            raise ValueError(answer.error)
        return answer.paths

    def shutdown(self) -> None:
        """End all processes. RuntimeError from any call afterwards, but this one."""
        self._finalizer()

    def _run(
        self,
        prompts: Iterator[Prompt],
        count: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """`prompts` are made one by one, in the loop: the first is on its way while the others are not."""
        params = params or self.get_default_sampling_params()
        each = [params] * count if not isinstance(params, Sequence) else list(params)
        if len(each) != count:
            raise ValueError(f"{count} prompts and {len(each)} sampling_params")
        ranks = [0] * count if priority is None else list(priority)
        if len(ranks) != count:
            raise ValueError(f"{count} prompts and {len(ranks)} of priority")
        for one in {id(one): one for one in each}.values():
            one.check(self.vocab_size)
        with tqdm(total=sum(one.n for one in each), desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._background.ask(self._client.run(self._submits(prompts, each, ranks), bar))

    def _submits(
        self, prompts: Iterator[Prompt], each: list[SamplingParams], ranks: list[int]
    ) -> Iterator[tuple[Submit, RequestOutput]]:
        assert self._config.resolved is not None
        eos, run = self._config.resolved.eos_token_ids, uuid.uuid4().hex
        for number, (prompt, params, priority) in enumerate(zip(prompts, each, ranks, strict=True)):
            name = f"{run}-{number}"
            submit = Submit(
                handles=tuple(self._client.new_handle() for _ in range(params.n)),
                request_ids=tuple(name_of(name, index) for index in range(params.n)),
                prompt=prompt,
                sampling=params.wire(eos, self.vocab_size),
                text=params.text(),
                max_tokens=params.max_tokens,
                want_ids=not isinstance(prompt, TokenPrompt) or bool(params.truncate_prompt_tokens),
                want_text=isinstance(prompt, ChatPrompt),
                priority=priority,
                arrival_s=time.time(),
            )
            text = prompt.text if isinstance(prompt, TextPrompt) else None
            ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
            yield submit, RequestOutput(name, text, ids, [CompletionOutput(index) for index in range(params.n)])


def _prompt(item: Any) -> Prompt:
    """One prompt of `generate`. ValueError for what is none."""
    if isinstance(item, dict):
        keys = [key for key in ("prompt_token_ids", "prompt") if item.get(key) is not None]
        if not keys:
            raise ValueError("a prompt that is a dict needs 'prompt' or 'prompt_token_ids'")
        item = item[keys[0]]
    if isinstance(item, str):
        return TextPrompt(item)
    try:
        return TokenPrompt(pack_i32(item))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a prompt is text, token ids, or a dict of either: {error}") from None


__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
