"""Structured outputs against the official JSON-Schema-Test-Suite (draft 2020-12, benchmarks/json_schema_suite.json).

    python -P benchmarks/json_schema_suite.py [--json FILE]

Each schema of the suite is compiled as a request's `response_format` is. Where it compiles, each instance of the suite is given to the
matcher, byte by byte, as a model would write it: valid ones should be accepted and invalid ones not. An invalid instance that is
accepted would be a wrong answer (`wrong`). A valid one that is not is an answer that no model can give (`not_written`): its text is
another one than the grammar writes, in the order of its keys or in the form of a number, or the library enforces more than it says.
"""

import json
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness

SUITE = Path(__file__).parent / "json_schema_suite.json"
MOST_ORDERS = 24  # in which an object's keys are tried


def byte_tokenizer() -> Any:
    """A vocabulary of single bytes and an end."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [bytes([byte]) for byte in range(256)] + [b"<|end|>"]
        special_token_ids = [256]  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)


def texts_of(value: Any) -> list[str]:
    """The value as JSON; of an object with its keys in several orders."""
    orders = [value]
    if isinstance(value, dict) and 1 < len(value) <= 4:
        orders = [dict(order) for order in list(permutations(value.items()))[:MOST_ORDERS]]
    return [json.dumps(order, ensure_ascii=False) for order in orders]


def accepts(grammar: str, text: str, tokenizer: Any) -> bool:
    """Whether the grammar's texts have this one."""
    from llguidance import LLMatcher

    from meshlm.runtime.grammars import limits

    matcher = LLMatcher(tokenizer, grammar, limits=limits(), log_level=0)
    data = text.encode("utf-8", "surrogatepass")
    return matcher.validate_tokens([*data, 256]) == len(data) + 1


def measure() -> dict[str, Any]:
    """What becomes of all schemas and instances of the suite."""
    from meshlm.detokenizer.grammar_cache import GrammarCache
    from meshlm.detokenizer.grammars import Grammars
    from meshlm.protocol.grammar import Grammar, GrammarKind
    from meshlm.runtime.errors import RequestError

    suite, tokenizer, grammars = (
        json.loads(SUITE.read_text("utf-8")),
        byte_tokenizer(),
        GrammarCache(Grammars({}).translated),
    )
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[Any] = []
    not_written: list[Any] = []
    for keyword, groups in suite["groups"].items():
        for group in groups:
            counts["schemas"] += 1
            try:
                asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(group["schema"]), "json")
                grammar = grammars.compile(asked).text
            except RequestError:
                refused[keyword] += 1
                continue
            counts["compiled"] += 1
            for description, data, valid in group["tests"]:
                kind = "valid" if valid else "invalid"
                counts[kind] += 1
                accepted = any(accepts(grammar, text, tokenizer) for text in texts_of(data))
                counts[f"{kind}_accepted"] += accepted
                if accepted != valid:
                    told = {"keyword": keyword, "schema": group["description"], "test": description, "data": data}
                    (not_written if valid else wrong).append(told)
    return {**counts, "refused": dict(refused), "wrong": wrong, "not_written": not_written}


def main() -> None:
    parser = harness.parser(__doc__)
    arguments = parser.parse_args()
    found = measure()
    harness.keep(arguments.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
