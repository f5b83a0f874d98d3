"""The keys of CUDA graphs: which steps have one in a --cudagraph-mode, how long the GPU is busy with these, and which of them a start
runs so that all of their kernels are compiled. Pure.

A graph of mixed steps holds any requests, so its attention is launched for as many as fit and as if their contexts were short: the
contexts of its decodes are not split among programs, and its prompts have the kernel that is faster where they see few keys. Those
for a few requests with long contexts do both. A decode's tiles are of the longest context that a request may have (--max-model-len),
but for a few requests which all have short ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from meshlm.protocol.config.engine import WorkerConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import graph_sizes
from meshlm.workers.rows.step_columns import Contexts

MAX_DECODES = 1024
# as scheduler_proc/budget.py ends steps
MIXED_TOKENS = [*range(graph_sizes.LEAST_MIXED, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512)]
MIXED_REQUESTS = [72, 288]  # 64 and 256 streams, and one that is padding; larger ones for --max-num-seqs and one
LONG_REQUESTS = [5, 9, 17, 33]  # behind long contexts: so few that these are split among programs
LAUNCHES_S = 0.028  # twice what the host needs to launch a step kernel by kernel: longer steps need no graph
STATES_LAUNCHES_S = 0.116  # ... of models with recurrent states, which have four times as many kernels
LONG_LAUNCHES_S = 0.016  # ... or little more, where contexts are long: a graph for any requests is much slower
# of ranks whose tokens travel to experts: prompts alone have more
TOGETHER_TOKENS = [*MIXED_TOKENS, *range(4608, 8193, 512)]
TOGETHER_LAUNCHES_S = 0.17  # what the host needs to launch such a step in halves: 2,600 kernels for 48 layers
WHOLE, MODEL, HEAD = "", "model", "head"
ANY, SHORT, LONG = "", "short", "long"


class Key(NamedTuple):
    """The kind of step that a graph was captured for."""

    tokens: int
    requests: int
    halves: bool = False  # of the step take turns (engine/together.py)
    part: str = WHOLE  # of the step: with grammars the head waits for masks, and is a graph of its own
    shared: bool = False  # decodes read shared prefixes together, where there are any (rows/shared_prefixes.py)
    contexts: str = ANY  # of decodes: SHORT; of mixed steps: LONG
    drafts: bool = False  # decodes of several tokens each, which stand as requests of their own
    adapters: bool = False  # some rows have one: steps in which none has are replayed without their kernels

    def of(self, part: str) -> "Key":
        """The graph of this part of the step; the head knows nothing of contexts."""
        if part == HEAD:
            return self._replace(part=part, shared=False, contexts=ANY, drafts=False, adapters=False)
        return self._replace(part=part)

    def graphs(self, *, pause: bool) -> "tuple[Key, ...]":
        """The graphs of a step; pause: between the model and the head the host has something to do."""
        return (self.of(MODEL), self.of(HEAD)) if pause else (self.of(WHOLE),)

    @property
    def uniform(self) -> bool:
        """Decodes only."""
        return self.tokens == self.requests

    @property
    def kind(self) -> tuple[bool, str, bool, str, bool, bool]:
        """The part of a key that those share that launch the same kernels."""
        return self.uniform, self.part, self.shared, self.contexts, self.drafts, self.adapters


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then in steps that waste at most an eighth of a batch."""
    sizes = [1, 2, 4]
    for upto, step in ((128, 8), (256, 16), (512, 32), (MAX_DECODES, 64)):
        sizes += range((sizes[-1] // step + 1) * step, upto + 1, step)
    limit = min(max_num_seqs, MAX_DECODES)
    return sorted({size for size in sizes if size < limit} | {limit})


def graph_keys(
    mode: str, max_num_seqs: int, max_num_batched_tokens: int, sizes: tuple[int, ...], num_parameters: int,
    *, most_tokens: int | None = None, together: bool = False, states: bool = False,
) -> list[Key]:  # fmt: skip
    """All graphs of a --cudagraph-mode. `sizes`: --cudagraph-capture-sizes, of decodes and of mixed steps; most_tokens:
    --max-cudagraph-capture-size. together: of ranks that step together; states: of a model with recurrent ones.

    Without either, mixed graphs end where a step of so many parameters takes the GPU longer than its launches take the host."""
    mixed, launches_s = MIXED_TOKENS, STATES_LAUNCHES_S if states else LAUNCHES_S
    if together:
        mixed, launches_s = TOGETHER_TOKENS, TOGETHER_LAUNCHES_S
    if sizes:
        mixed, launches_s = graph_sizes.of_mixed(sizes, max_num_batched_tokens), math.inf
    elif most_tokens is not None:
        mixed, launches_s = TOGETHER_TOKENS, math.inf
    if mode == "NONE":
        return []
    decodes = graph_sizes.of_decodes(sizes, max_num_seqs) if sizes else decode_sizes(max_num_seqs)
    keys = [Key(size, size) for size in decodes] if mode != "PIECEWISE" else []
    if mode != "FULL_DECODE_ONLY":
        most_requests = max_num_seqs + 1
        requests = [size for size in MIXED_REQUESTS if size < most_requests] + [most_requests]
        keys += [
            Key(tokens, most)
            for tokens in mixed
            for most in requests
            if most < tokens <= max(max_num_batched_tokens, MIXED_TOKENS[0])
            and 2 * num_parameters * tokens / FLOP_PER_S <= launches_s
        ]
    return sorted(key for key in keys if most_tokens is None or key.tokens <= most_tokens)


def keys_of_drafts(max_lines: int) -> list[Key]:
    """Graphs of decodes with drafts, by their tokens: any mix of drafts fits. max_lines: tokens of a step, at most."""
    return [Key(size, size, drafts=True) for size in decode_sizes(max_lines)[1:]]


def keys_of_adapters(keys: Sequence[Key]) -> list[Key]:
    """Beside those for whole steps with any contexts, graphs of steps some of whose rows have adapters."""
    return [key._replace(adapters=True) for key in keys if key.contexts == ANY and not key.halves]


def long_requests(max_num_seqs: int) -> list[int]:
    """Requests of the graphs for long contexts, one of them padding."""
    return sorted({min(size, max_num_seqs + 1) for size in LONG_REQUESTS})


FLOP_PER_S = 6e14  # of a large matrix product, at most
BYTES_PER_S = 4e12  # of keys and values, at most
LONG_CONTEXT = 4096  # tokens; steps in which nobody sees more are as they were measured, in graphs


class StepTime(NamedTuple):
    """The least seconds of a model's step."""

    token_s: float  # for a token,
    pair_s: float = 0.0  # for each key that a prompt token sees,
    key_s: float = 0.0  # and for each that a decode sees

    def of(self, num_tokens: int, contexts: Contexts) -> float:
        return self.token_s * num_tokens + self.pair_s * contexts.num_pairs + self.key_s * contexts.num_keys


def of_model(spec: ModelSpec, num_parameters: int, key_bytes: int) -> StepTime:
    """Contexts count in layers that see all of them. spec, num_parameters: this worker's; key_bytes: of a number in the cache."""
    token_s = 2 * num_parameters / FLOP_PER_S
    kinds = [one for one in spec.attentions if not one.slides]
    if spec.mla is not None or any(one.attention_chunk_size for one in spec.attentions):
        return StepTime(token_s)
    pairs = sum(4 * spec.num_attention_heads * kind.head_dim for kind in kinds)
    keys = sum(2 * kind.num_key_value_heads * kind.head_dim * key_bytes for kind in kinds)
    return StepTime(token_s, pairs / FLOP_PER_S, keys / BYTES_PER_S)


def mode_of(worker: WorkerConfig, why_no_prompts: Callable[[], str]) -> tuple[str, str]:
    """The mode and, where it is not the one that was asked for, why.

    why_no_prompts: why graphs must hold decodes alone; "" where they may hold prompts. Asked where it matters."""
    asked = worker.cudagraph_mode
    if worker.enforce_eager:
        return "NONE", "--enforce-eager" if asked != "NONE" else ""
    if worker.profile_layers:
        return "NONE", "--profile-layers" if asked != "NONE" else ""
    if asked in ("NONE", "FULL_DECODE_ONLY") or not (why := why_no_prompts()):
        return asked, ""
    return ("NONE" if asked == "PIECEWISE" else "FULL_DECODE_ONLY"), why


def steps_to_warm_up(
    decodes: list[int], rows: set[int], max_rows: int, longest_prompt: int, max_tokens: int
) -> Iterator[list[int]]:
    """Token counts of eager steps. decodes: numbers of requests whose decodes have all tiles of attention. rows: numbers of tokens
    which have all kinds of products between them, each up to so many."""
    for count in decodes:  # each tile is a variant, and each has one beside prompts
        yield [1] * count
        yield [1] * min(count, max_rows - 1) + [3]
    for length in (3, longest_prompt):  # prompts of either shape of tile
        yield [length]
    most = min(max_tokens, max_rows * longest_prompt)
    for tokens in sorted({min(number, most) for number in rows}):  # prompts: few requests may have many tokens
        rest = tokens % longest_prompt
        yield [longest_prompt] * (tokens // longest_prompt) + ([rest] if rest else [])


def graphs_to_warm_up(keys: list[Key], rows: set[int], most: int) -> list[Key]:
    """One of the graphs of each kind: eager steps have neither lines that are in order nor one request more than may run.

    rows: as for `steps_to_warm_up`, which have up to `most` tokens; with few requests the padding of a graph makes them more."""
    drafts = [key for key in keys if key.drafts]
    decodes = [key for key in keys if key.uniform and key.contexts == ANY and not key.drafts]
    short = [key for key in keys if key.contexts == SHORT]
    mixed: dict[int, Key] = {}
    for key in keys:
        if not key.uniform:
            mixed.setdefault(key.requests, key)
    wide = {
        max((key for key in keys if not key.uniform and most < key.tokens <= number), default=None) for number in rows
    }
    return decodes[:1] + drafts[:1] + short + list(mixed.values()) + sorted(key for key in wide if key is not None)


def long_to_warm_up(keys: list[Key], requests: Sequence[int]) -> list[Key]:
    """Mixed steps behind long contexts: prompts have the kernel for few tokens in the shortest, that for many keys in the longest."""
    tokens = [key.tokens for key in keys if not key.uniform]
    return [Key(number, most, contexts=LONG) for most in requests for number in sorted({*tokens[:1], *tokens[-1:]})]


def shared_to_warm_up(keys: list[Key], numbers: list[int], max_rows: int) -> list[Key]:
    """Steps whose decodes share prefixes: with so many requests, which have all kinds of launches, and with one more than may run."""
    wide = [key for key in keys if not key.uniform and key.requests > max_rows]
    return [key._replace(shared=True) for key in [*(Key(number, number) for number in numbers), *wide[:1]]]
