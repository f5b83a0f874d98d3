"""Speculative decoding: --speculative-config and its flags as one record, and the models and devices that cannot have it.

The keys are vLLM's. What is not there is refused by its key, with the reason. Called by resolve.py.
"""

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, SpeculativeConfig
from meshlm.protocol.config.speculative import MAX_SPECULATIVE_TOKENS, METHODS
from meshlm.runtime import plugins
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules, check

FLAG = "--speculative-config"
FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
ABSENT = {
    **dict.fromkeys(("medusa", "mlp_speculator"), "drafts of a model's further heads are not there"),
    **dict.fromkeys(("dflash", "dflare", "dspark", "xpress"), "drafts of a block at once are not there"),
    "ngram_gpu": "ngram is the method",
    "extract_hidden_states": "hidden states are not given out",
    "custom_class": "a drafter of another package is an entry point of meshlm.drafters, whose name is the method",
}
ON_GPU = ("ngram", "draft_model", "mtp", "eagle", "eagle3")
OF_MODEL = ("draft_model", "eagle", "eagle3")  # methods of another model
_ANY = 1 << 30
# Key -> the kind of its number, and from where to where it may be.
NUMBERS: dict[str, tuple[type, float, float]] = {
    "num_speculative_tokens": (int, 1, MAX_SPECULATIVE_TOKENS),
    "prompt_lookup_min": (int, 1, _ANY),
    "prompt_lookup_max": (int, 1, _ANY),
    "suffix_decoding_max_tree_depth": (int, 1, _ANY),
    "suffix_decoding_max_cached_requests": (int, 0, _ANY),
    "suffix_decoding_max_spec_factor": (float, 0, _ANY),
    "suffix_decoding_min_token_prob": (float, 0, 1),
    "synthetic_acceptance_length": (float, 1, MAX_SPECULATIVE_TOKENS + 1),
}
OWN = {"prompt_lookup": "ngram", "suffix_decoding": "suffix"}  # how a key begins that is of one method
_OF_MODELS = "a model that drafts is served as the model is"
_SIZED = "the number of drafts follows no table of batch sizes"
# Key -> values that ask for what is the case anyway, and why others are refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_speculative_tokens_per_batch_size": (([],), _SIZED),
    "disable_by_batch_size": ((), _SIZED),
    "enable_adaptive_verification": ((False,), "drafts have no confidences"),
    "draft_sample_method": (("greedy",), "a draft is accepted where it is the token that the model draws"),
    "parallel_drafting": ((False,), _OF_MODELS),
    "disable_padded_drafter_batch": ((False,), _OF_MODELS),
    "use_local_argmax_reduction": ((False,), _OF_MODELS),
    "use_heterogeneous_vocab": ((False,), _OF_MODELS),
    "enforce_eager": ((False,), _OF_MODELS),
    **dict.fromkeys(
        (
            *("draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend", "attention_backend"),
            *("kv_cache_dtype", "max_model_len", "revision", "code_revision", "draft_load_config", "dspark_draft_topk"),
            *("index_share_for_mtp_iteration", "speculative_token_tree"),
        ),
        ((), _OF_MODELS),
    ),
}
KNOWN = (*FLAGS, *NUMBERS, "rejection_sample_method", "synthetic_acceptance_rates", *ONLY)


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what --speculative-config and its flags come to. UsageError names the key that cannot be honoured."""
    given = _given(config.speculative)
    if given is None:
        return config
    check(_method(config.speculative, given))
    method = given["method"]
    check(_keys(config.speculative, given))
    found = {key: given[key] for key in SpeculativeConfig.__struct_fields__ if key in given}
    if method not in OF_MODEL:
        found.pop("model", None)  # the method's own name
    if method == "suffix":
        depth = given.get("suffix_decoding_max_tree_depth", SpeculativeConfig().suffix_decoding_max_tree_depth)
        found.setdefault("num_speculative_tokens", min(depth, MAX_SPECULATIVE_TOKENS))
    if method == "ngram":
        found |= _lookup(given)
    if given.get("rejection_sample_method") == "synthetic":
        check(_synthetic(given, found["num_speculative_tokens"]))
        found["synthetic_acceptance_rates"] = _rates(given, found["num_speculative_tokens"])
    return replace(config, speculative=replace(config.speculative, **found))


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """What cannot have drafts so far. Of a settled configuration; pools: the model gives vectors."""
    if not c.speculative.method:
        return
    name = f.spec.architecture
    yield f.device == "fake", "--device fake", "it drafts what --fake-drafts says; give that alone"
    on_gpu = f.device == "cuda"
    yield (
        f.device != "cpu" and not on_gpu,
        f"--device {f.device}",
        f"drafts are computed on CPUs and GPUs; leave out {FLAG}",
    )
    yield pools or f.spec.encoder_only, FLAG, f"{name} gives vectors here, and no text to draft; leave it out"
    yield f.spec.audio_encoder is not None, FLAG, f"{name} hears, and its answers are not drafted so far; leave it out"
    why = f"caches of a model that drafts do not fit into pages of the states of {name}; use ngram, suffix or mtp"
    method = c.speculative.method
    name_of_method = f"{FLAG}: method {method}"
    yield on_gpu and method not in ON_GPU, name_of_method, f"on a GPU there are {', '.join(ON_GPU)} so far"
    yield (
        on_gpu and f.spec.state is not None,
        FLAG,
        f"states of {name} go back on --device cpu alone so far; leave it out",
    )
    yield (
        on_gpu and c.parallel.pipeline_parallel_size > 1,
        FLAG,
        "on GPUs the stages of a pipeline draft nothing so far; leave it out",
    )
    yield on_gpu and c.lockstep, FLAG, "GPUs that share experts draft nothing so far; leave it out"
    yield f.spec.state is not None and method in OF_MODEL, f"{FLAG}: method {method}", why
    staged, why = (
        c.parallel.pipeline_parallel_size > 1,
        "each stage of a pipeline drafts, and has no states of the others",
    )
    yield staged and method in (*OF_MODEL, "mtp"), f"{FLAG}: method {method}", f"{why}; use ngram or suffix"
    yield staged and f.spec.state is not None, FLAG, f"states of {name} cannot go back in a pipeline; leave it out"


def most(c: MeshConfig, device: str) -> int:
    """The tokens that are drafted for a request and step, at most. Of a settled configuration."""
    return c.speculative.num_speculative_tokens or (c.worker.fake_drafts if device == "fake" else 0)


def _given(c: SpeculativeConfig) -> dict[str, Any] | None:
    """The keys that are given, in JSON or as flags; null is the default. None: no drafts are asked for."""
    given: dict[str, Any] = {}
    if c.speculative_config:
        with raised_as(UsageError, ValueError, of=f"{FLAG} {c.speculative_config}"):
            given = json.loads(c.speculative_config)
        if not isinstance(given, dict):
            raise UsageError(f"{FLAG} {c.speculative_config}: a JSON object is expected")
        given = {key: value for key, value in given.items() if value is not None}
    for key, setting in FLAGS.items():
        value = getattr(c, setting)
        if value in ("", None):
            continue
        if given.setdefault(key, value) != value:
            flag = f"--{setting.replace('_', '-')}"
            raise UsageError(f"{FLAG}: {key} {given[key]} is not what {flag} says; give one of them")
    if not given and not c.speculative_config:
        return None
    if "method" not in given and (model := given.get("model")):
        given["method"] = "ngram" if model in ("ngram", "[ngram]") else "draft_model"  # as in vLLM
    if given.get("method") == "[ngram]":
        given["method"] = "ngram"
    if str(given.get("method")).endswith("_mtp"):
        given["method"] = "mtp"  # as in vLLM, whose families had names of their own
    return given


def _name(c: SpeculativeConfig, given: Mapping[str, Any], key: str) -> str:
    """Where a key was given, and its value."""
    setting = FLAGS.get(key, "")
    if setting and getattr(c, setting) not in ("", None):
        return f"--{setting.replace('_', '-')} {given[key]}"
    return f"{FLAG}: {key} {json.dumps(given[key])}"


def _method(c: SpeculativeConfig, given: Mapping[str, Any]) -> Rules:
    methods = (*METHODS, *plugins.names(plugins.DRAFTERS, os.environ))
    there = f"there are {', '.join(methods)}"
    yield "method" not in given, FLAG, f"method is missing; {there}"
    method, name = str(given["method"]), _name(c, given, "method")
    why = ABSENT.get(method)
    yield why, name, f"{why}; {there}"
    yield method not in methods, name, there


def _keys(c: SpeculativeConfig, given: Mapping[str, Any]) -> Rules:
    """Of each key alone, and of those that its method needs."""
    method = given["method"]
    for key, value in given.items():
        name = _name(c, given, key)
        close = difflib.get_close_matches(key, KNOWN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield key not in KNOWN, f"{FLAG}: unknown key {key}{hint}", ""
        values, why = ONLY.get(key, ((), ""))
        yield why and not _is_one_of(value, values), name, f"{why}; leave it out"
        of = next((method for begin, method in OWN.items() if key.startswith(begin)), method)
        yield of != method, name, f"it is of the method {of}; leave it out"
        if key in NUMBERS:
            kind, least, most = NUMBERS[key]
            what = f"a {'whole ' if kind is int else ''}number from {least} to {most} is expected"
            yield not _is_number(value, kind, least, most), name, what
    model, of_model = given.get("model"), method in OF_MODEL
    unnamed = of_model and not isinstance(model, str)
    yield unnamed, FLAG, "model is missing: a folder, a .gguf file or a hub name"
    needless = not of_model and model not in (None, method, f"[{method}]")
    yield needless, _name(c, given, "model") if model else "", f"{method} needs none; leave it out"
    unsaid = method != "suffix" and "num_speculative_tokens" not in given
    yield unsaid, FLAG, f"num_speculative_tokens is missing; 1 to {MAX_SPECULATIVE_TOKENS}"
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    yield low and high and low > high, f"{FLAG}: prompt_lookup_max {high}", f"it is less than prompt_lookup_min ({low})"
    way = given.get("rejection_sample_method", "standard")
    why = "there are standard, and synthetic for measurements"
    yield way not in ("standard", "synthetic"), f"{FLAG}: rejection_sample_method {json.dumps(way)}", why
    for key in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
        yield key in given and way != "synthetic", f"{FLAG}: {key}", "it needs rejection_sample_method synthetic"


def _synthetic(given: Mapping[str, Any], count: int) -> Rules:
    """Of drafts that are accepted by chance. count: drafts of a step."""
    names = rates, length = "synthetic_acceptance_rates", "synthetic_acceptance_length"
    one = sum(name in given for name in names) == 1
    yield not one, f"{FLAG}: rejection_sample_method synthetic", f"give one of {rates} and {length}"
    mean = given.get(length, 1)
    yield mean > count + 1, f"{FLAG}: {length} {mean}", f"a step has 1 to {count + 1} tokens"
    values, name = given.get(rates, [0.0] * count), f"{FLAG}: {rates} {json.dumps(given.get(rates))}"
    is_list = isinstance(values, list) and all(_is_number(value, float, 0, 1) for value in values)
    why = f"a list of {count} numbers from 0 to 1 is expected, one for each draft"
    yield not is_list or len(values) != count, name, why
    yield sorted(values, reverse=True) != values, name, "they rise; a draft is accepted only where all before it are"


def _lookup(given: Mapping[str, Any]) -> dict[str, int]:
    """One of the two is the other's default."""
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    found = {"prompt_lookup_min": low or high, "prompt_lookup_max": high or low}
    return {key: value for key, value in found.items() if value}


def _rates(given: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """A mean length (with the token that follows the drafts) with the least variance: so many are always accepted, one sometimes."""
    if (rates := given.get("synthetic_acceptance_rates")) is not None:
        return tuple(map(float, rates))
    accepted = given["synthetic_acceptance_length"] - 1
    return tuple(min(1.0, max(0.0, accepted - nth)) for nth in range(count))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == one and type(value) is type(one) for one in values)


def _is_number(value: Any, kind: type, least: float, most: float) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
