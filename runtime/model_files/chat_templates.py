"""The chat templates of a model by their names, and which of them a command line chooses. Called by model_files.py.

A model has one template, "default", or several: transformers and vLLM render `tool_use` for a request with tools. ModelFilesError says
what is wrong with a file.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import read_json, read_text

DEFAULT = "default"
TOOL_USE = "tool_use"


class _Named(Struct):
    name: str
    template: str


def of_folder(folder: Path) -> dict[str, str]:
    """Finds templates as transformers does: .jinja files come before tokenizer_config.json, and that before a processor's
    chat_template.json."""
    found = _of_file(folder / "chat_template.json") | _of_file(folder / "tokenizer_config.json")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    return found | {name: read_text(path) for name, path in files.items()}


def of_gguf(fields: dict[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default, `tokenizer.chat_template.NAME` a named one."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in fields.items() if name.startswith(f"{key}.")}
    found = named | ({DEFAULT: fields[key]} if fields.get(key) else {})
    return {name: text for name, text in found.items() if isinstance(text, str)}


def choose(given: str, templates: dict[str, str]) -> dict[str, str]:
    """--chat-template: the name of one of them, a file, or a template's text. It is then the only one."""
    if given in templates:
        return {DEFAULT: templates[given]}
    if "{" in given or "\n" in given:
        return {DEFAULT: given}
    path = Path(given).expanduser()
    if not path.exists():
        names = f"; the model has {', '.join(sorted(templates))}" if templates else ""
        raise ModelFilesError(f"--chat-template {given}: no such file or folder{names}")
    return {DEFAULT: read_text(path)}


def _of_file(path: Path) -> dict[str, str]:
    given = read_json(path).get("chat_template") if path.is_file() else None
    try:
        template = msgspec.convert(given, str | dict[str, str] | list[_Named] | None)
    except msgspec.ValidationError:
        text = "chat_template must be a template, or a list of objects with name and template"
        raise ModelFilesError(f"{path}: {text}") from None
    match template:
        case str() if template:
            return {DEFAULT: template}
        case dict():
            return template
        case list():
            return {one.name: one.template for one in template}
    return {}
