"""`meshlm serve --help=WORD`: the flags of one group, or those that speak of WORD. main.py calls it before its parser."""

from collections.abc import Sequence

from meshlm.supervisor.settings.flags import Setting, settings

EVERYTHING = ("", "all", "page")
GROUPS = "listgroup"
OF_VLLM = {"frontend": "server", "loadconfig": "model", "compilationconfig": "worker", "deviceconfig": "worker"}
"""Groups of vLLM's help that have another name here."""


def asked(words: Sequence[str]) -> str | None:
    """The WORD of --help=WORD, lower case; None without one, and where all help is wanted."""
    found = next((word.partition("=")[2].lower() for word in words if word.startswith("--help=")), None)
    return None if found in EVERYTHING else found


def plain(words: Sequence[str]) -> list[str]:
    """--help=all as --help."""
    return ["--help" if word.startswith("--help=") else word for word in words]


def lines(word: str) -> list[str]:
    """The lines that --help=WORD shows."""
    every = list(settings())
    groups = list(dict.fromkeys(setting.section for setting in every))
    if word == GROUPS:
        return [f"groups for --help=GROUP: {', '.join(groups)}"]
    group = OF_VLLM.get(word, word.removesuffix("config"))  # vLLM's groups are called ModelConfig and so on
    if group in groups:
        return [line for setting in every if setting.section == group for line in _shown(setting)]
    plain_word = word.strip("-").replace("_", "-")
    found = [line for setting in every if plain_word in _searched(setting) for line in _shown(setting)]
    return found or [f"no flag speaks of {word!r}; --help shows all, --help={GROUPS} the groups"]


def _searched(setting: Setting) -> str:
    return f"{setting.flag} {_text(setting)}".lower()


def _text(setting: Setting) -> str:
    return (setting.meta.description if setting.meta else "") or ""


def _shown(setting: Setting) -> list[str]:
    default = "" if setting.default in (None, "", (), True, False) else f" (default {setting.default})"
    return [f"  {setting.flag}", f"      {_text(setting)}{default}"]
