"""What a model of transformers is, asked of a process of its own: whoever asks has no torch, and code that comes with a model, where
it is trusted, does not run here. Called by model_files.py.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from meshlm.architectures import text_part
from meshlm.architectures.registry import family_of
from meshlm.protocol.model import ModelSpec, TransformersSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.extras import how_to_install
from meshlm.runtime.model_files.model_config import near

LIMIT_S = 300


class Request(Struct, frozen=True):
    """A question to workers/models/transformers/look.py."""

    source: TransformersSpec
    folder: str


class Found(Struct, frozen=True):
    """Its answer: one of both is there."""

    spec: ModelSpec | None = None
    error: str = ""


_SENSES = {
    "what it sees": ("vision_config", "vision_tower", "visual", "img_processor", "mm_vision_tower"),
    "what it hears": ("audio_config", "audio_processor"),
}
"""By keys of config.json: other parts of a model whose text is served."""


def installed() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("transformers") is not None


class RemoteCode(NamedTuple):
    """What flags say of code that comes with a model."""

    trusted: bool = False
    repository: str = ""  # that the model is from
    revision: str = ""  # another one than that of its weights


def falls_back(config: dict[str, Any]) -> bool:
    """Whether a model that our own do not know may be known to transformers."""
    name = _architecture(config)
    known = family_of(name) is not None or name in text_part.architectures()
    return not known and bool(name) and isinstance(config.get("model_type"), str) and installed()


def parse_config(
    config: dict[str, Any], path: Path, code: RemoteCode, *, chosen: bool
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model's shape, and what a user should know. chosen: a flag says so, else there is nothing else. ModelFilesError."""
    name = _architecture(config)
    try:
        spec = describe(config, path, code)
    except ModelFilesError as error:
        if chosen:
            raise ModelFilesError(f"--model-impl transformers: {path}: {name}: {error}") from None
        raise ModelFilesError(
            f"{path}: architecture {name} is not supported{near([name])}; and transformers' model of it cannot be served: {error}"
        ) from None
    why = "--model-impl transformers" if chosen else "our own models do not know it"
    said = f"{path}: {name} is computed by transformers' model with our attention ({why})"
    unserved = [sense for sense, keys in _SENSES.items() if any(config.get(key) for key in keys)]
    return spec, (said + "".join(f"; {sense} is refused" for sense in unserved),)


def describe(config: dict[str, Any], folder: Path, code: RemoteCode) -> ModelSpec:
    """The shape of the model of this config.json. ModelFilesError says why it cannot be served."""
    if not installed():
        raise ModelFilesError(f"transformers is not installed; {how_to_install('transformers')}")
    source = source_of(config, code)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "meshlm.workers.models.transformers.look"],
            input=msgspec.json.encode(Request(source, str(folder.absolute()))),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFilesError(f"transformers did not build it within {LIMIT_S} s") from None
    last = next(iter(reversed(done.stdout.splitlines())), b"")
    try:
        found = msgspec.json.decode(last, type=Found)
    except msgspec.MsgspecError:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ModelFilesError(f"transformers could not build it ({said[-1] if said else 'no answer'})") from None
    if found.spec is None:
        raise ModelFilesError(found.error)
    return found.spec


def _architecture(config: dict[str, Any]) -> str:
    """The one that config.json names; empty where it names none or several."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and len(names) == 1 else ""


def source_of(config: dict[str, Any], code: RemoteCode) -> TransformersSpec:
    """What all processes need to know to make the model."""
    return TransformersSpec(
        architecture=_architecture(config),
        config=json.dumps(config),
        trust_remote_code=code.trusted,
        repository=code.repository,
        code_revision=code.revision,
    )
