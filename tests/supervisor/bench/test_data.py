"""Data sets of the benchmarks: lengths, choices by vLLM's rules, and one line for a file that is wrong."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshlm.supervisor.bench import data
from meshlm.supervisor.bench.data import Lengths, Reading, Sample
from meshlm.supervisor.errors import UsageError


class Words:
    """A tokenizer: a token a word, and a template of three tokens."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[len(word) for word in text.split()] for text in texts]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join("x" * token for token in token_ids)

    def chat(self, text: str) -> list[int]:
        return [0, *self.encode([text])[0], 0, 0]


WORDS = Words()


def test_random_prompts_share_a_prefix_and_vary_both_ways() -> None:
    samples = data.random_ids(50, Lengths(10, 20, prefix_len=3, input_ratio=0.5), 5000, seed=1)
    assert len({tuple(sample.prompt[:3]) for sample in samples}) == 1
    assert {sample.prompt_len for sample in samples} <= set(range(8, 19))
    assert len({sample.prompt_len for sample in samples}) > 3
    assert {sample.output_len for sample in samples} == {20}
    assert samples == data.random_ids(50, Lengths(10, 20, prefix_len=3, input_ratio=0.5), 5000, seed=1)


def test_prefixes_are_repeated() -> None:
    samples = data.repeated_prefixes(10, 3, Lengths(2, 7, prefix_len=5), 5000, seed=1)
    assert [sample[1:] for sample in samples] == [(7, 7)] * 9
    assert len({tuple(sample.prompt[:5]) for sample in samples}) == 3
    with pytest.raises(UsageError, match="--num-prompts 2: at least"):
        data.repeated_prefixes(2, 3, Lengths(2, 7, prefix_len=5), 5000, seed=1)


def reading(tmp_path: Path, text: str, name: str = "file.jsonl", count: int = 4, **more: Any) -> Reading:
    (tmp_path / name).write_text(text)
    return Reading(str(tmp_path / name), count, 0, **{"shuffle": False, **more})


def conversation(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"value": text} for text in texts]}


def test_sharegpt_keeps_what_vllm_keeps(tmp_path: Path) -> None:
    entries = [
        conversation("too short", "a b c d e"),
        conversation("a b c d", "e f"),  # too short an answer, unless its length is given
        conversation("a b c d e", "f g h i"),
        conversation("alone"),
        conversation("w " * 1025, "a b c d"),
        {"id": 7},
    ]
    file = reading(tmp_path, json.dumps(entries))
    good = Sample("a b c d e", 5, 4)
    assert data.sharegpt(file, WORDS.encode, None) == [good] * 4
    assert data.sharegpt(reading(tmp_path, json.dumps(entries), oversample=False), WORDS.encode, None) == [good]
    given = data.sharegpt(reading(tmp_path, json.dumps(entries), oversample=False), WORDS.encode, 2)
    assert [(sample.prompt, sample.output_len) for sample in given] == [("a b c d", 2), ("a b c d e", 2)]


def test_a_sonnet_fits_and_shares_its_first_lines(tmp_path: Path) -> None:
    file = reading(tmp_path, "".join(f"line {n} has five words\n" for n in range(40)))
    samples = data.sonnet(file, WORDS, Lengths(60, 9, prefix_len=30), as_text=True)
    assert len(samples) == 4
    for sample in samples:
        assert isinstance(sample.prompt, str)
        assert sample.prompt.startswith(data.POEM + "line 0 has five words\nline 1 ")
        assert sample.prompt_len == len(WORDS.chat(sample.prompt)) <= 60
        assert sample.output_len == 9
    assert data.sonnet(file, WORDS, Lengths(60, 9, prefix_len=30), as_text=False)[0].prompt == WORDS.chat(
        str(samples[0].prompt)
    )
    with pytest.raises(UsageError, match="--sonnet-input-len 14: more than the 14 tokens"):
        data.sonnet(file, WORDS, Lengths(14, 9), as_text=True)


def test_lines_that_never_fit_end(tmp_path: Path) -> None:
    file = reading(tmp_path, "w " * 90 + "\n")
    with pytest.raises(UsageError, match="its lines are too long for --sonnet-input-len 20"):
        data.sonnet(file, WORDS, Lengths(20, 9), as_text=True)


def test_custom_prompts_are_messages_unless_they_are_not(tmp_path: Path) -> None:
    text = '{"prompt": "a bb", "output_tokens": 5}\n\n{"prompt": "ccc", "output_tokens": "6"}\n'
    file = reading(tmp_path, text, count=0)
    assert data.custom(file, WORDS, None, template=True) == [Sample([0, 1, 2, 0, 0], 5, 5), Sample([0, 3, 0, 0], 4, 6)]
    assert data.custom(file, WORDS, 9, template=False) == [Sample("a bb", 2, 9), Sample("ccc", 1, 9)]
    assert len(data.custom(reading(tmp_path, text, count=1), WORDS, 9, template=False)) == 1
    assert len(data.custom(reading(tmp_path, text, count=5), WORDS, 9, template=False)) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": 3, "output_tokens": 5}', "line 1: `prompt` must be text"),
        ('{"prompt": "x", "output_tokens": 5}\n{"prompt": "x"}', "line 2: no 'output_tokens'"),
        ('{"prompt": "x", "output_tokens": "many"}', "line 1: invalid literal"),
        ("[]", "line 1: "),
        ("{", "line 1: "),
        ("\n", "no usable entry"),
    ],
)
def test_a_custom_line_that_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        data.custom(reading(tmp_path, text), WORDS, None, template=False)
    with pytest.raises(UsageError, match=r"must be a .jsonl file"):
        data.custom(reading(tmp_path, text, "file.json"), WORDS, None, template=False)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"conversations": [{}, {}]}]', "[]"])
def test_what_is_no_sharegpt_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=f"--dataset-path {tmp_path}") as said:
        data.sharegpt(reading(tmp_path, text), WORDS.encode, None)
    assert "\n" not in str(said.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="--dataset-path /nowhere: No such file"):
        data.sharegpt(Reading("/nowhere", 1, 0), WORDS.encode, None)


def test_requests_that_are_longer_than_the_context_are_told_before_they_are_sent() -> None:
    data.check_fits([Sample("x", 5, 3), Sample("x", 2, 2)], 8)
    with pytest.raises(UsageError, match=r"--max-model-len 7: a request has 5 \+ 3 = 8 tokens"):
        data.check_fits([Sample("x", 2, 2), Sample("x", 5, 3)], 7)


def test_rows_of_the_hub_by_their_columns() -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "conversations": [{"from": "human", "value": "a b"}, {"value": "c d e"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"turns": ["a b c", "d"]},
        {"question": "a b c d", "answer": "e"},
    ]
    found = data.hugging_face(Reading("x/y", 4, 0), WORDS.encode, rows, None)
    assert [sample[1:] for sample in found] == [(2, 3), (1, 128), (3, 128), (4, 1)]
    assert [sample.output_len for sample in data.hugging_face(Reading("x/y", 2, 0), WORDS.encode, rows, 7)] == [7, 7]
    with pytest.raises(UsageError, match="x/y: none of its columns is a known one: a, b"):
        data.hugging_face(Reading("x/y", 4, 0), WORDS.encode, [{"a": 1, "b": 2}], None)


def test_the_hub_needs_a_package_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="--dataset-name hf: it needs a package; pip install datasets"):
        data.rows_of_hub("x/y", None, None, stream=True)
    asked: list[Any] = []

    def load(path: str, **options: Any) -> list[Any]:
        asked.append((path, options))
        if path == "bad":
            raise OSError("no\nnetwork")
        return [1]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert data.rows_of_hub("x/y", "part", None, stream=True) == [1]
    assert asked == [("x/y", {"name": "part", "split": "train", "streaming": True})]
    with pytest.raises(UsageError, match="--dataset-path bad: OSError: no network"):
        data.rows_of_hub("bad", None, None, stream=True)
