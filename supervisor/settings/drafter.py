"""The model that drafts for another (--speculative-config): read as any model is, or from the other one's own files (mtp), and served
as the other one is.

Called by resolve.py.
"""

import json
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from meshlm.architectures.drafters import PLAIN_NAMES, fitted, nextn_spec
from meshlm.architectures.registry import family_of
from meshlm.protocol.config import MeshConfig, ModelConfig, Resolved
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import model_files
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings import parallel, speculative
from meshlm.supervisor.settings.rules import Rules, check


def with_drafter(config: MeshConfig, resolved: Resolved) -> Resolved:
    """With the facts of the model that drafts, if one does. UsageError for one that cannot draft for this model."""
    asked = config.speculative
    if asked.method == "mtp":
        drafter = _of_its_own(resolved)
        check(_of_ranks(config, drafter.spec))
        return replace(resolved, drafter=drafter)
    if asked.method not in speculative.OF_MODEL:
        return resolved
    files = _read(config, resolved)
    spec, flag = files.spec, f"{speculative.FLAG}: model {asked.model}"
    if asked.method in PLAIN_NAMES:
        with raised_as(UsageError, ValueError, of=flag):
            spec = fitted(spec, resolved.spec, asked.method)
    else:
        check(_rules(flag, files, resolved))
    check(_of_ranks(config, spec))
    parallel.check(config.parallel, spec, resolved.device, 0)
    drafter = replace(
        resolved,
        spec=spec,
        model_path=str(files.path),
        weights_url=files.weights_url,
        tokenizer_path=str(files.tokenizer_path),
        load_format=files.load_format,
    )
    return replace(resolved, drafter=drafter)


def _of_its_own(resolved: Resolved) -> Resolved:
    """The layer behind the model's last, which drafts, of the same files."""
    flag, family = f"{speculative.FLAG}: method mtp", family_of(resolved.spec.architecture)
    assert family is not None
    if resolved.load_format in ("gguf", "sharded_state"):
        why = f"layers that draft are not read from {resolved.load_format}; give the folder of the model"
        raise UsageError(f"{flag}: {why}")
    with raised_as(UsageError, ValueError, of=flag):
        return replace(resolved, spec=nextn_spec(resolved.spec, family))


def _of_ranks(config: MeshConfig, spec: ModelSpec) -> Rules:
    """What keeps it from drafting for ranks that share experts: each drafts when and as often as it likes."""
    flag, why = f"{speculative.FLAG}: method {config.speculative.method}", "would have to be asked of other ranks"
    yield config.lockstep and spec.moe is not None, flag, f"experts of {spec.architecture} {why}; use ngram or suffix"


def _read(config: MeshConfig, resolved: Resolved) -> ModelFiles:
    """The files of a model that drafts."""
    asked = config.speculative
    wanted: Literal["dummy", "auto"] = "dummy" if resolved.load_format == "dummy" else "auto"
    flags = ModelConfig(model=asked.model, load_format=wanted, download_dir=config.model.download_dir)
    if asked.method in PLAIN_NAMES:
        flags = replace(flags, tokenizer=resolved.tokenizer_path)  # it has none
    with raised_as(UsageError, ModelFilesError):
        files = model_files.resolve_model(flags)
        if asked.method in PLAIN_NAMES and files.spec.architecture == "LlamaForCausalLM":
            own = json.dumps({"architectures": [PLAIN_NAMES[asked.method]]})
            return model_files.resolve_model(replace(flags, hf_overrides=own))
        return files


def _rules(flag: str, files: ModelFiles, resolved: Resolved) -> Rules:
    """What keeps it from drafting."""
    spec, own = files.spec, resolved.spec
    yield (
        spec.draft is not None,
        flag,
        f"{spec.architecture} drafts from a model's states; method {spec.draft and spec.draft.method} is its own",
    )
    yield spec.encoder_only or files.speech is not None, flag, f"{spec.architecture} gives no text to draft"
    yield spec.state is not None, flag, f"the states of {spec.architecture} cannot go back to before a refused draft"
    yield (
        spec.transformers is not None,
        flag,
        f"{spec.architecture} is computed by transformers' code, which cannot draft",
    )
    limit = spec.max_position_embeddings
    why = f"its context is {limit}; give --max-model-len {limit} at most"
    yield limit < resolved.max_model_len, flag, why
    tokens = _tokens(files.tokenizer_path), _tokens(Path(resolved.tokenizer_path))
    why = f"its tokenizer has other tokens than that of {resolved.model_path}"
    yield tokens[0] is not None and tokens[1] is not None and tokens[0] != tokens[1], flag, why
    sizes = spec.vocab_size, own.vocab_size
    why = f"its vocabulary has {sizes[0]} tokens, that of {resolved.model_path} {sizes[1]}"
    yield None in tokens and sizes[0] != sizes[1], flag, why


def _tokens(path: Path) -> dict[str, int] | list[object] | None:
    """The vocabulary of a tokenizer.json; None where there is none to compare."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    found: dict[str, int] | list[object] | None = json.loads(file.read_text("utf-8")).get("model", {}).get("vocab")
    return found or None
