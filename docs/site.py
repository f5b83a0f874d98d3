"""The sources of the documentation's site, for mkdocs: docs/, the README as its first page, and the references of flags and messages.

    python -P docs/site.py FOLDER        (`make docs` calls it)

Links to files of the tree that are no pages become their names.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from meshlm.protocol.wire.channels import CHANNELS
from meshlm.protocol.wire.digest import union_members
from meshlm.supervisor.settings.flags import settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def build(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in sorted(DOCS.rglob("*")):
        target = out / path.relative_to(DOCS)
        if path.suffix == ".md":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page(path, target, out), "utf-8")
        elif path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (out / "index.md").write_text(page(ROOT / "README.md", out / "index.md", out), "utf-8")
    (out / "flags.md").write_text("\n".join(flags()) + "\n", "utf-8")
    (out / "protocol.md").write_text("\n".join(protocol()) + "\n", "utf-8")


def page(path: Path, target: Path, out: Path) -> str:
    """The text of a page, with links as they are on the site."""

    def link(found: re.Match[str]) -> str:
        mark, text, to = found.groups()
        name, hash_, anchor = to.partition("#")
        if "://" in to or to.startswith("mailto:") or not name:
            return found.group(0)
        there = (path.parent / name).resolve()
        if there == ROOT / "README.md":
            return f"{mark}[{text}]({'../' * (len(target.relative_to(out).parts) - 1)}index.md{hash_}{anchor})"
        if not there.is_relative_to(DOCS) or there.is_dir():
            return text
        up = "../" * (len(target.relative_to(out).parts) - 1)
        return f"{mark}[{text}]({up}{there.relative_to(DOCS)}{hash_}{anchor})"

    return LINK.sub(link, path.read_text("utf-8"))


def flags() -> Iterator[str]:
    """The reference of all settings, from the configuration."""
    yield "# Flags of `meshlm serve`"
    yield ""
    yield "Each is also a key of `--config FILE`, by the same name without `--`. This page is made from `protocol/config/`."
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            yield from ("", f"## {section}", "", "| flag | default | |", "|---|---|---|")
        text = (setting.meta.description if setting.meta else "") or ""
        default = setting.default
        shown = (
            ""
            if default in (None, "", ())
            else " ".join(map(str, default))
            if isinstance(default, tuple)
            else str(default)
        )
        yield f"| `{setting.flag}` | {f'`{shown}`' if shown else ''} | {_cell(text)} |"


def protocol() -> Iterator[str]:
    """The reference of all messages between processes, from the table of channels."""
    yield "# Messages between processes"
    yield ""
    meanings = "whose fields' meanings are in the modules of protocol/edges."
    yield f"Who says what to whom. This page is made from `protocol/wire/channels.py`, {meanings}"
    yield from ("", "| from | to | messages |", "|---|---|---|")
    kinds: dict[str, type] = {}
    for channel in CHANNELS:
        members = {kind.__name__: kind for kind in union_members(channel.messages)}
        kinds |= members
        yield f"| {channel.sender.value} | {channel.receiver.value} | {', '.join(sorted(members))} |"
    yield from ("", "| message | |", "|---|---|")
    for name, kind in sorted(kinds.items()):
        yield f"| `{name}` | {_cell(' '.join((kind.__doc__ or '').split()))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
