"""Where this machine takes Debian's packages from: of /etc/apt, in both of its forms. Used by image.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ETC = Path("/etc")
SCHEMES = ("http://", "https://", "file:")  # what debootstrap takes too
FIRST = ("debian.sources", "ubuntu.sources")  # before what others have added


class Source(NamedTuple):
    """One archive with its suites."""

    address: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def own_suite(etc: Path = ETC) -> str:
    """The suite that this machine is of, as `bookworm`; "" where it does not say."""
    try:
        lines = (etc / "os-release").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition("=")[2].strip("'\"") for line in lines if line.startswith("VERSION_CODENAME=")), "")


def mirror_of(suite: str, etc: Path = ETC) -> str:
    """The archive that has the main part of the suite; "" without one."""
    folder = etc / "apt/sources.list.d"
    files = [etc / "apt/sources.list", *sorted(folder.glob("*"), key=lambda path: (path.name not in FIRST, path.name))]
    for file in files:
        if not file.is_file():
            continue
        read = _paragraphs if file.suffix == ".sources" else _lines
        for source in read(file.read_text("utf-8", "replace")):
            if suite in source.suites and "main" in source.components and source.address.startswith(SCHEMES):
                return source.address.rstrip("/")
    return ""


def _lines(text: str) -> Iterator[Source]:
    """`deb [options] ADDRESS SUITE COMPONENT...`."""
    for line in text.splitlines():
        kind, _, rest = line.partition("#")[0].strip().partition(" ")
        rest = rest.strip()
        if rest.startswith("["):
            rest = rest.partition("]")[2].strip()
        words = rest.split()
        if kind == "deb" and len(words) > 2:
            yield Source(words[0], (words[1],), tuple(words[2:]))


def _paragraphs(text: str) -> Iterator[Source]:
    """Fields with their values, a paragraph for each source (deb822)."""
    for paragraph in text.split("\n\n"):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if not line.startswith((" ", "\t")):
                name, _, line = line.partition(":")
            fields.setdefault(name.strip().lower(), []).extend(line.split())
        is_off = fields.get("enabled", ["yes"])[:1] == ["no"]
        if "deb" in fields.get("types", []) and not is_off:
            for address in fields.get("uris", []):
                yield Source(address, tuple(fields.get("suites", [])), tuple(fields.get("components", [])))
