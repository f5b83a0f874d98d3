"""What benchmarks send: made of random token ids, or read from a file, by vLLM's rules; and the tokenizers that read it."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError, UsageError, raised_as

MIN_LEN, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # what vLLM's sampler of ShareGPT keeps
CHUNK = 500  # texts tokenized at a time
UNTOLD_LEN = 128  # of an answer that a data set does not have
POEM = "Pick as many lines as you can from these poem lines:\n"  # of the sonnet data set
TRIES = 100  # of a sonnet's prompt that is too long
Encode = Callable[[list[str]], list[list[int]]]


class Sample(NamedTuple):
    """One request: the prompt as text or ids, and how many tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


class Texts(Protocol):
    """The served model's tokenizer."""

    def encode(self, texts: list[str], /) -> list[list[int]]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def chat(self, text: str) -> list[int]:
        """A user's message in the chat template, with what begins the answer."""
        ...


def check_fits(samples: Iterable[Sample], max_model_len: int) -> None:
    """UsageError when an answer would end early."""
    longest = max(samples, key=lambda sample: sample.prompt_len + sample.output_len)
    if (total := longest.prompt_len + longest.output_len) > max_model_len:
        tokens = f"{longest.prompt_len} + {longest.output_len} = {total} tokens"
        raise UsageError(f"--max-model-len {max_model_len}: a request has {tokens}")


@dataclass(frozen=True)
class Lengths:
    """The lengths of requests in tokens; input_len is without the prefix. The ratios say how far lengths are from the mean."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    input_ratio: float = 0.0
    output_ratio: float = 0.0


def random_ids(count: int, lengths: Lengths, vocab_size: int, seed: int) -> list[Sample]:
    """Prompts of random ids behind one prefix that all share."""
    source = random.Random(seed)

    def around(mean: int, ratio: float) -> int:
        return source.randint(max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio))))

    prefix = _ids(source, lengths.prefix_len, vocab_size)
    samples = []
    for _ in range(count):
        prompt = prefix + _ids(source, around(lengths.input_len, lengths.input_ratio), vocab_size)
        samples.append(Sample(prompt, len(prompt), around(lengths.output_len, lengths.output_ratio)))
    return samples


def _ids(source: random.Random, count: int, vocab_size: int) -> list[int]:
    low = min(1000, vocab_size // 2)  # past the special ids of most vocabularies
    return [source.randrange(low, vocab_size) for _ in range(count)]


def repeated_prefixes(count: int, prefixes: int, lengths: Lengths, vocab_size: int, seed: int) -> list[Sample]:
    """count // prefixes requests with each of so many random prefixes, shuffled."""
    if count < prefixes:
        raise UsageError(f"--num-prompts {count}: at least --prefix-repetition-num-prefixes ({prefixes})")
    source = random.Random(seed)
    samples = []
    for _ in range(prefixes):
        prefix = _ids(source, lengths.prefix_len, vocab_size)
        for _ in range(count // prefixes):
            prompt = prefix + _ids(source, lengths.input_len, vocab_size)
            samples.append(Sample(prompt, len(prompt), lengths.output_len))
    source.shuffle(samples)
    return samples


@dataclass(frozen=True)
class Reading:
    """The way in which a file's samples are chosen."""

    path: str
    count: int
    seed: int
    shuffle: bool = True
    oversample: bool = True

    def filled(self, samples: list[Sample]) -> list[Sample]:
        """Gives as many samples as are wanted, some of them again where there are too few."""
        if not samples:
            raise self.error("no usable entry")
        missing = max(0, self.count - len(samples)) if self.oversample else 0
        return [*samples, *random.Random(self.seed).choices(samples, k=missing)] if missing else samples

    def shuffled(self, entries: list[Any]) -> list[Any]:
        if self.shuffle:
            random.Random(self.seed).shuffle(entries)
        return entries

    def error(self, why: object) -> UsageError:
        return UsageError(f"--dataset-path {self.path}: {' '.join(str(why).split())}")

    def check(self) -> None:
        """UsageError when the file cannot be read."""
        with raised_as(UsageError, OSError, ValueError, of=f"--dataset-path {self.path}"):
            Path(self.path).open("rb").close()

    def text(self) -> str:
        with raised_as(UsageError, OSError, ValueError, of=f"--dataset-path {self.path}"):
            return Path(self.path).read_text("utf-8")


def sharegpt(reading: Reading, encode: Encode, output_len: int | None) -> list[Sample]:
    """First question of each conversation; the output is as long as the answer was, unless output_len says."""
    try:
        conversations = [entry["conversations"] for entry in json.loads(reading.text()) if "conversations" in entry]
        pairs = [(turns[0]["value"], turns[1]["value"]) for turns in conversations if len(turns) >= 2]
    except (ValueError, LookupError, TypeError) as error:
        raise reading.error(f"not a JSON list of ShareGPT's conversations: {error!r}") from None
    return reading.filled(_of_pairs(reading, reading.shuffled(pairs), encode, output_len))


def _of_pairs(reading: Reading, pairs: list[tuple[str, str]], encode: Encode, output_len: int | None) -> list[Sample]:
    samples: list[Sample] = []
    for begin in range(0, len(pairs), CHUNK):
        if len(samples) == reading.count:
            break
        part = pairs[begin : begin + CHUNK]
        questions = encode([question for question, _ in part])
        answers = encode([answer for _, answer in part]) if output_len is None else questions
        for (question, _), ids, reply in zip(part, questions, answers, strict=True):
            length = len(reply) if output_len is None else output_len
            long_enough = len(ids) >= MIN_LEN and (output_len is not None or length >= MIN_LEN)
            if long_enough and len(ids) <= MAX_PROMPT and len(ids) + length <= MAX_TOTAL:
                samples.append(Sample(question, len(ids), length))
            if len(samples) == reading.count:
                break
    return samples


def sonnet(reading: Reading, texts: Texts, lengths: Lengths, as_text: bool) -> list[Sample]:
    """Lines of a poem, chosen by chance, about as many as fill input_len; the first prefix_len tokens are the same in all. as_text: for
    a chat, whose server has the template."""
    lines = [line for line in reading.text().splitlines(keepends=True) if line.strip()]
    if not lines:
        raise reading.error("no line of text")
    per_line = sum(map(len, texts.encode(lines))) / len(lines)
    base = len(texts.chat(POEM))
    if lengths.input_len <= base:
        raise UsageError(f"--sonnet-input-len {lengths.input_len}: more than the {base} tokens around the lines")
    wanted = max(round((lengths.input_len - base) / per_line), 1)
    prefix = lines[: max(round((lengths.prefix_len - base) / per_line), 0)]
    source = random.Random(reading.seed)
    samples: list[Sample] = []
    too_long = 0
    while len(samples) < reading.count:
        prompt = POEM + "".join(prefix + source.choices(lines, k=max(0, wanted - len(prefix))))
        ids = texts.chat(prompt)
        if len(ids) <= lengths.input_len:
            samples.append(Sample(prompt if as_text else ids, len(ids), lengths.output_len))
        elif (too_long := too_long + 1) >= TRIES * reading.count:
            raise reading.error(f"its lines are too long for --sonnet-input-len {lengths.input_len}")
    return samples


def custom(reading: Reading, texts: Texts, output_len: int | None, template: bool) -> list[Sample]:
    """A JSON object a line, with `prompt` and, without output_len, `output_tokens`. template: the prompt is a user's message."""
    if not reading.path.endswith(".jsonl"):
        raise reading.error("must be a .jsonl file, a JSON object with `prompt` a line")
    found: list[tuple[str, int]] = []
    for number, line in enumerate(reading.text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            length = int(entry["output_tokens"]) if output_len is None else output_len
            if not isinstance(entry["prompt"], str) or length < 1:
                raise ValueError("`prompt` must be text, and `output_tokens` at least 1")
            found.append((entry["prompt"], length))
        except (ValueError, LookupError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise reading.error(f"line {number}: {what}") from None
    found = reading.shuffled(found)
    found = found[: reading.count] if reading.count > 0 else found
    if template:
        templated = [(texts.chat(prompt), length) for prompt, length in found]
        return reading.filled([Sample(ids, len(ids), length) for ids, length in templated])
    lens = [len(ids) for ids in texts.encode([prompt for prompt, _ in found])]
    plain = zip(found, lens, strict=True)
    return reading.filled([Sample(prompt, prompt_len, length) for (prompt, length), prompt_len in plain])


def hugging_face(
    reading: Reading, encode: Encode, rows: Iterable[dict[str, Any]], output_len: int | None
) -> list[Sample]:
    """Rows of a data set of the hub: the first column that is known is the prompt."""
    found: list[tuple[str, str]] = []
    for row in rows:
        if len(found) == reading.count:
            break
        found.append(_question(row, reading))
    prompts = encode([question for question, _ in found])
    answers = encode([answer for _, answer in found]) if output_len is None else prompts
    samples = []
    for (question, answer), ids, reply in zip(found, prompts, answers, strict=True):
        length = output_len if output_len is not None else len(reply) if answer else UNTOLD_LEN
        samples.append(Sample(question, len(ids), max(1, length)))
    return reading.filled(samples)


def _said(turn: Any) -> str:
    return turn if isinstance(turn, str) else str(turn.get("value") or turn.get("content") or "")


def _question(row: dict[str, Any], reading: Reading) -> tuple[str, str]:
    """The first question of a row, and its answer where there is one."""
    for name in ("conversations", "conversation", "messages", "turns"):
        if isinstance(turns := row.get(name), list) and turns:
            said = [_said(turn) for turn in turns[:2]]
            return said[0], "" if name == "turns" or len(said) < 2 else said[1]
    for question, answer in (
        *(("prompt", "canonical_solution"), ("question", "answer"), ("problem", "solution")),
        *(("instruction", "output"), ("input", "output"), ("text", "")),
    ):
        if isinstance(row.get(question), str):
            return row[question], str(row.get(answer) or "")
    raise reading.error(f"none of its columns is a known one: {', '.join(row)}")


def rows_of_hub(path: str, subset: str | None, split: str | None, stream: bool) -> Any:
    """The rows of a data set of Hugging Face's hub. UsageError says what is missing."""
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UsageError("--dataset-name hf: it needs a package; pip install datasets") from None
    try:
        return datasets.load_dataset(path, name=subset, split=split or "train", streaming=stream)
    except (OSError, ValueError, RuntimeError, LookupError) as error:  # of the hub, the network or the file
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UsageError(f"--dataset-path {path}: {text}") from None


class ServerTexts:
    """The served model's tokenizer, by the server's routes (data.Texts). StartError when the server does not tokenize."""

    def __init__(self, server: Server, model: str, template_kwargs: Mapping[str, Any] | None) -> None:
        self._server, self._model, self._kwargs = server, model, dict(template_kwargs or {})

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self._tokens({"prompt": text}) for text in texts]

    def chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        kwargs = {"chat_template_kwargs": self._kwargs} if self._kwargs else {}
        return self._tokens({"messages": messages, "add_generation_prompt": True, **kwargs})

    def decode(self, token_ids: list[int]) -> str:
        return str(self._ask("/detokenize", {"tokens": token_ids}, "prompt"))

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        found: list[int] = self._ask("/tokenize", body, "tokens")
        return found

    def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        try:
            with self._server.request("POST", path, {"model": self._model, **body}) as response:
                return msgspec.json.decode(response.read())[key]
        except StartError as error:
            raise StartError(f"POST {path}: {error}; --tokenizer takes one of your own") from None


class OwnTexts:
    """A tokenizer.json. Chat templates are the server's all the same."""

    def __init__(self, name: str, server: ServerTexts) -> None:
        from tokenizers import Tokenizer

        file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            self._tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
        except Exception as error:  # tokenizers raises nothing narrower
            raise UsageError(f"--tokenizer {name}: {' '.join(str(error).split())}") from None
        self.chat = server.chat

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts)]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))
