"""What travels with a request is one tuple, and nobody between its maker and its worker knows one kind of it."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from meshlm.protocol.audio import Audio
from meshlm.protocol.drafting import Drafting
from meshlm.protocol.edges import admit, step, text
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.extras import Extra, Extras, find_extra, generates, max_drafts, num_bytes
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.pool import Pool, PoolKind

ROOT = Path(__file__).parents[2]
KINDS: tuple[type[ExtraKind], ...] = get_args(Extra)
DO_SOMETHING = {"scheduler_proc/extras.py"}  # what else in these rooms does something with a kind


def test_the_same_field_all_the_way() -> None:
    for message in (text.Submit, admit.EngineRequest, step.NewRow):
        types = {field.name: field.type for field in msgspec.structs.fields(message)}
        assert types["extras"] == Extras
        for name, kind in types.items():
            assert name == "extras" or not set(KINDS) & {kind, *get_args(kind)}, f"{message.__name__}.{name}"


@pytest.mark.parametrize("room", ["scheduler_proc", "coordinator", "protocol/edges", "protocol/wire"])
def test_no_room_on_the_way_names_a_kind(room: str) -> None:
    names = re.compile(r"\b(" + "|".join(kind.__name__ for kind in KINDS) + r")\b")
    for path in (ROOT / room).rglob("*.py"):
        if str(path.relative_to(ROOT)) not in DO_SOMETHING:
            code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL)
            assert not names.search(code), f"{path.relative_to(ROOT)}: {names.search(code)}"


def test_a_kind_answers_for_itself() -> None:
    grammar, audio, pool = Grammar(GrammarKind.REGEX, "a+", "guided_regex"), Audio(bytes(8)), Pool(PoolKind.ALL)
    assert (find_extra((grammar, audio), Audio), find_extra((grammar, audio), Pool)) == (audio, None)
    assert num_bytes((grammar, audio)) == 10
    assert (generates((grammar, audio)), generates((audio, pool))) == (True, False)
    assert (pool.num_vectors(7), Pool(PoolKind.LAST).num_vectors(7), grammar.num_vectors(7)) == (7, 1, 0)
    assert (grammar.constraint, grammar.is_prepared, grammar.max_drafts) == ("guided_regex", True, None)
    assert [max_drafts(extras) for extras in ((), (audio,), (audio, Drafting(3)), (Drafting(3), grammar))] == [
        None,
        None,
        3,
        3,
    ]
    assert audio.key_parts(0, 16) != Audio(bytes(12)).key_parts(0, 16)
    assert audio.key_parts(16, 32) == b"", "the keys of later blocks have it from the first one"
    assert pool.cut(3, 5) is pool
