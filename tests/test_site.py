"""The documentation's site builds without a warning; commands and programs in its pages are what they say."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from meshlm.supervisor.cli import main
from meshlm.supervisor.settings.flags import settings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^(?:    |\$ )meshlm ([^#\n]*)", re.M)
SHORT = re.compile(r"(?<![\w-])(--[a-z][\w-]+)")


def test_it_builds_strictly(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    runpy.run_path(str(ROOT / "docs/site.py"))["build"](source)
    flags = (source / "flags.md").read_text()
    assert [setting.flag for setting in settings() if f"`{setting.flag}`" not in flags] == []
    assert "| `StepPlan` |" in (source / "protocol.md").read_text()
    config = tmp_path / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text().replace("build/docs-source", str(source)).replace("build/site", str(site))
    config.write_text(text)
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "-q", "--strict", "-f", str(config)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    page = (site / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page), "nothing is loaded from elsewhere"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_in_a_page_are_python(page: Path) -> None:
    for program in PROGRAM.findall(page.read_text("utf-8")):
        ast.parse(program)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_a_page_are_there(page: Path) -> None:
    """With their flags, as the parsers have them; examples in which a part stands for another are read as far as they go."""
    for line in COMMAND.findall(page.read_text("utf-8")):
        command = re.split(r"[\s\[|]", line.strip(), maxsplit=1)[0]
        assert command.replace("-", "_") in main.COMMANDS, f"{page.name}: meshlm {line}"
        given = SHORT.findall(line.replace("\\", " "))
        if command in ("bench", "launch") or not given:
            continue
        taken = main.parser_of([])._subparsers._group_actions[0].choices[command]._option_string_actions  # type: ignore[union-attr,index]
        assert [flag for flag in given if flag not in taken] == [], f"{page.name}: meshlm {line}"
