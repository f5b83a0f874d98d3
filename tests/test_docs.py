"""What the documentation names is there: relative links, their headings, and the files of the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(
    r"(?<![\w/.~*<>-])((?:[\w-]+/)*[\w-]+\.(?:py|md|c|yaml|yml|toml|sh)|[\w-]+_(?:h200|cpu)\.json)\b(?!/)"
)
DEFINED = re.compile(r"`([\w/]+\.py):\s+([A-Za-z_][\w.]*)`")
EXAMPLES = {"config.toml", "serve.yaml", "cases.yaml", "index.py"}  # files of the reader's own


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in headings(there), f"{page.name} links to {target}, and no heading has that name"


def endings() -> set[str]:
    """Each file of the tree by its whole path, and by every end of it."""
    known = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.rglob("*") if path.is_file()}
    known |= {path.name for path in ROOT.iterdir()}
    return {name[start + 1 :] for name in known for start in (-1, *(m.start() for m in re.finditer("/", name)))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """By their whole path, or by the end of it, as `coordinator/routing.py` may be `routing.py` further on."""
    missing = set(NAMED.findall(page.read_text("utf-8"))) - endings() - EXAMPLES
    assert not missing, f"{page.name} names {sorted(missing)}"


def test_modules_that_the_code_names_are_there() -> None:
    """Docstrings and comments name modules, which move: `(rows/table.py)`."""
    ends, missing = endings(), dict[str, set[str]]()
    for link in (ROOT / "src/meshlm").iterdir():
        for file in link.resolve().rglob("*.py"):
            named = set(re.findall(r"(?<![\w/.*<\"'-])(?:\w+/)*\w+\.py\b(?!\")", file.read_text("utf-8")))
            if gone := named - ends - EXAMPLES:
                missing[str(file.relative_to(ROOT))] = gone
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_names_are_there(page: Path) -> None:
    """`batching.py: Batching.plan` is a class and a method, or two names, that one of the files called so defines."""
    for path, name in DEFINED.findall(page.read_text("utf-8")):
        files = [file for folder in FOLDERS for file in folder.rglob(Path(path).name) if str(file).endswith(f"/{path}")]
        wanted = [re.compile(rf"\b(def|class) {part}\b|^\s*(self\.)?{part}\b.*[=:]", re.M) for part in name.split(".")]
        texts = [file.read_text("utf-8") for file in files]
        assert any(all(one.search(text) for one in wanted) for text in texts), f"{page.name} names {path}: {name}"


def test_the_list_of_rooms_is_the_tree() -> None:
    """docs/architecture.md names each room of the product once, under its folder."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    block = text.partition("## Rooms")[2].partition("`tests/test_imports.py`")[0]
    named: dict[str, set[str]] = {}
    folder = ""
    for line in block.splitlines():
        if top := re.match(r" {4}(\w+)/", line):
            folder = top[1]
            named[folder] = set()
        elif line.startswith(" " * 6):
            named[folder] |= set(re.findall(r"\b(\w+)/(?=\s|$)", line.partition("`")[0]))
    links = [path for path in (ROOT / "src/meshlm").iterdir() if path.is_symlink() and path.name != "kernels"]
    rooms = {link.name: {file.parent.name for file in link.resolve().glob("*/__init__.py")} for link in links}
    assert {name: found for name, found in named.items() if name != "kernels"} == rooms
