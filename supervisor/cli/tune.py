"""`meshlm tune MODEL`: measure the kernels for a model's sizes once, thoroughly, so that later starts have them."""

import argparse
import json
from pathlib import Path

from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.settings import flags


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tune",
        help="measure kernels for a model's sizes on this GPU, and keep what is fastest",
        description="Starts the model with the flags of `meshlm serve`, has its workers measure (--tune full, unless given) and ends. "
        "With --tuning-dir the tables are written there: they can be copied to machines with the same GPU and versions, or committed.",
    )
    flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    given = flags.given(arguments)
    if "tuning_dir" in given:
        given["tuning_dir"] = str(Path(str(given["tuning_dir"])).absolute())
    LLM(**{"tune": "full", "enforce_eager": True, **given}).shutdown()
    folder = given.get("tuning_dir")
    if folder is None:
        print("What was measured is kept in the user's cache; the workers' log names the folder.")
        return 0
    for line in found(Path(str(folder))):
        print(line)
    return 0


def found(folder: Path) -> list[str]:
    """A line for each table."""
    lines = []
    for path in sorted(folder.glob("*/tables/*.json")):
        products = json.loads(path.read_text("utf-8"))["products"]
        won = sum(bool(entry["rows"]) for entry in products)
        lines.append(f"{path}: {len(products)} sizes, {won} of them faster than the plain way")
    return lines or [f"{folder}: no table; nothing was to be measured on this device"]
