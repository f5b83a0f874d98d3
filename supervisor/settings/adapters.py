"""--enable-lora and what belongs to it: which adapters there are from the start, held against the model. Called by resolve.py."""

import json
from collections.abc import Iterator
from pathlib import Path

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import adapter_files
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules

FLAG, MODULES, RESOLVER = "--enable-lora", "--lora-modules", "--lora-resolver-dir"
DEVICES = ("cpu", "cuda")


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """What adapters do not go with. pools: the model gives vectors."""
    asked = c.adapters
    yield bool(asked.lora_modules) and not asked.enable_lora, MODULES, f"needs {FLAG}"
    if not asked.enable_lora:
        return
    why_dir = "needs --allow-runtime-lora-updating"
    yield bool(asked.lora_resolver_dir) and not asked.allow_runtime_lora_updating, RESOLVER, why_dir
    is_folder = not asked.lora_resolver_dir or Path(asked.lora_resolver_dir).is_dir()
    yield not is_folder, f"{RESOLVER} {asked.lora_resolver_dir}", "there is no such folder"
    why = adapter_files.why_not(f.spec)
    yield why, FLAG, why
    yield f.device not in DEVICES, FLAG, f"--device {f.device} has no products of adapters; --device cpu and cuda have"
    together = f.device == "cuda" and c.lockstep
    yield together, FLAG, "ranks whose experts step together have no adapters on GPUs yet; leave it out"
    yield pools, FLAG, "models of vectors take no adapters yet; leave it out"
    yield c.worker.deterministic, FLAG, "not proven to be deterministic; leave out --deterministic or it"
    few = asked.max_cpu_loras is not None and asked.max_cpu_loras < asked.max_loras
    yield few, f"--max-cpu-loras {asked.max_cpu_loras}", f"must be at least --max-loras, which is {asked.max_loras}"


def read(config: MeshConfig, facts: Facts, served_names: tuple[str, ...]) -> tuple[Adapter, ...]:
    """The adapters of --lora-modules. UsageError names the one that cannot be served, and why."""
    asked, found = config.adapters, dict[str, Adapter]()
    limits = adapter_files.Limits.of(config, facts.device)
    for word in asked.lora_modules:
        for name, path in _named(word):
            if name in found or name in served_names:
                raise UsageError(f"{MODULES} {word}: the name {name} is taken")
            with raised_as(UsageError, ModelFilesError, of=MODULES):
                found[name] = adapter_files.adapter_of(name, Path(path), facts.spec, limits)
    return tuple(found.values())


def _named(word: str) -> Iterator[tuple[str, str]]:
    """Names and folders that one word of the flag gives: name=folder, or JSON of one or of a list."""
    if not word.startswith(("{", "[")):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise UsageError(f'{MODULES} {word}: name=folder is expected, or {{"name": ..., "path": ...}}')
        yield name, path
        return
    with raised_as(UsageError, ValueError, of=f"{MODULES} {word}"):
        given = json.loads(word)
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("name", "path")):
            raise UsageError(f"{MODULES} {word}: each needs a name and a path")
        if more := sorted(one.keys() - {"name", "path", "base_model_name"}):
            raise UsageError(f"{MODULES} {word}: unknown key {more[0]}; there are name, path and base_model_name")
        yield one["name"], one["path"]
