"""benchmarks/README.md lists the scripts that are there, and no others."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_each_script_has_a_line_and_each_line_a_script() -> None:
    named = set(re.findall(r"`(\w+\.py)[^`]*`", (FOLDER / "README.md").read_text("utf-8")))
    assert named == {path.name for path in FOLDER.glob("*.py")}


def test_something_names_each_result() -> None:
    """In a document, perhaps as `engine_step_*_h200.json`; or code that reads it."""
    root = FOLDER.parent
    files = [path for glob in ("*.md", "docs/**/*.md", "tests/**/*.py", "kernels/**/*.py") for path in root.glob(glob)]
    texts = "\n".join(path.read_text("utf-8") for path in [*files, *FOLDER.glob("*.py")])
    patterns = re.findall(r"[\w.-]*\*[\w*.-]*\.json", texts)
    for path in (FOLDER / "results").glob("*.json"):
        assert path.name in texts or any(path.match(pattern) for pattern in patterns), f"nothing names {path.name}"
