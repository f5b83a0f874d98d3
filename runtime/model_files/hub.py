"""Files of the Hugging Face hub: what of a repository is fetched, into its cache or --download-dir. Called by model_files.py.

A name with a colon, owner/name:Q4_K_M, is the .gguf file of that quantisation, or several files that are parts of one model.
"""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import gguf_files

_NOT_ALL = [
    *("original/*", "consolidated*", "*.pth"),  # the same weights a second time, which nothing reads
    *("optimizer.*", "scheduler.*", "rng_state*", "random_states*", "training_args.*"),  # of the training
]
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = {
    "safetensors": ("*.safetensors",),
    "sharded_state": ("*.safetensors",),
    "pt": ("*.bin", "*.pt"),
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "dummy": (),
}
"""What --load-format reads: the files of the first pattern that the repository has."""
_LEXICAL = ("sparse_linear.pt", "colbert_linear.pt")  # BGE-M3's
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
)
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]*")


class HubName(NamedTuple):
    """A repository at a revision, and where it is kept."""

    name: str  # owner/name
    revision: str
    download_dir: str
    flag: str = "MODEL"  # for messages

    def fetched(self, *patterns: str) -> Path:
        """The folder with the files that match. ModelFilesError."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        where, asked = f"{self.flag} {self.name}", partial(snapshot_download, self.name, ignore_patterns=_NOT_ALL)
        folder, revision = self.download_dir or None, self.revision or None
        try:
            return Path(asked(revision=revision, cache_dir=folder, allow_patterns=list(patterns)))
        except HFValidationError:
            raise ModelFilesError(f"{where}: neither a file or folder nor a hub name (owner/name)") from None
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelFilesError(f"{where}: not a folder, and the hub did not give it ({why})") from None


def model(source: HubName, *, code: bool, load_format: str = "auto") -> Path:
    """A model's folder, with weights of this format alone. code: with the Python files that come with it. ModelFilesError."""
    if load_format not in _WEIGHTS:
        raise ModelFilesError(
            f"--load-format {load_format}: {source.flag} {source.name} names no file of it; {source.name}:Q4_K_M does"
        )
    small = (*_SMALL, *(("*.py",) if code else ()))
    if not _WEIGHTS[load_format]:
        return source.fetched(*small)
    for number, pattern in enumerate(_WEIGHTS[load_format]):
        found = source.fetched(pattern, *(() if number else (*small, *_LEXICAL)))
        if any(found.glob(pattern)):
            break
    return found


def tokenizer(source: HubName) -> Path:
    """A folder with the files of a tokenizer."""
    return source.fetched(*_TOKENIZER)


def split_name(name: str) -> tuple[str, str]:
    """The repository or folder, and the quantisation of its .gguf file, or an empty string."""
    stem, colon, quant = name.rpartition(":")
    return (stem, quant) if colon and stem and _QUANT.fullmatch(quant) else (name, "")


def gguf(source: HubName, quant: str) -> Path:
    """The .gguf file of this quantisation, of several parts the first."""
    cases = dict.fromkeys((quant, quant.upper(), quant.lower()))
    folder = source.fetched(*(f"*{case}*.gguf" for case in cases))
    return chosen(folder, quant, f"{source.flag} {source.name}:{quant}")


def ggufs(folder: Path) -> list[Path]:
    """The models in .gguf files of a folder and the folders in it: of one in several files the first."""
    found = (*folder.glob("*.gguf"), *folder.glob("*/*.gguf"))
    return sorted(file for file in found if not gguf_files.is_later_part(file))


def chosen(folder: Path, quant: str, where: str) -> Path:
    """The one file whose name ends in this quantisation. ModelFilesError lists what is there."""
    found = [file for file in ggufs(folder) if _is_of(file, quant)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in (found or ggufs(folder))[:8]) or "none"
    raise ModelFilesError(
        f"{where}: {'several files are' if found else 'no .gguf file is'} of this quantisation; there are: {names}"
    )


def _is_of(file: Path, quant: str) -> bool:
    stem = re.sub(r"-\d{5}-of-\d{5}", "", file.stem).lower()
    return stem == quant.lower() or stem.endswith(tuple(f"{mark}{quant.lower()}" for mark in "-._"))
