"""What SmolLM2 says through the official client: every way to ask that changes the text, or what comes with it.

Greedy text is the oracle: whatever cuts, continues or describes it must agree with it, streamed and whole. Requests
of one test run at the same time, because a step of the model takes as long for ten of them as for one.
"""

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from asking import EOS, FRANCE, SYSTEM, TALE, Greedy, ask, chat, extra_of, joined, post, stream, together
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion
from serving import Serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]


@pytest.fixture(scope="module")
def client(smol: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", timeout=100, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> Greedy:
    (choice,) = ask(client, max_tokens=24, logprobs=1, extra={"return_token_ids": True, "ignore_eos": True}).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    found = Greedy(choice.text, choice.logprobs.tokens, extra_of(choice, "token_ids"))
    assert len(found.pieces) == len(found.ids) == 24
    assert "".join(found.pieces) == found.text
    return found


# --- stops ---


def check_stop(client: openai.OpenAI, greedy: Greedy, stops: list[str], include: bool) -> None:
    """The text ends at the stop that is complete first, streamed as whole, and no token after it is counted."""
    extra = {"include_stop_str_in_output": include, "ignore_eos": True, "return_token_ids": True}
    whole = ask(client, stop=stops, max_tokens=24, extra=extra)
    chunks = stream(client, stop=stops, max_tokens=24, extra=extra)
    (choice,) = whole.choices
    ends = [greedy.text.find(stop) + len(stop) for stop in stops if stop in greedy.text]
    if not ends:
        assert (choice.text, choice.finish_reason) == (greedy.text, "length")
        used = 24
    else:
        end = min(ends)
        stop = max((stop for stop in stops if greedy.text[:end].endswith(stop)), key=len)
        assert choice.text == greedy.text[: end if include else end - len(stop)]
        assert choice.finish_reason == "stop"
        assert extra_of(choice, "stop_reason") == stop
        used = next(n for n in range(25) if len("".join(greedy.pieces[:n])) >= end)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == used
    assert extra_of(choice, "token_ids") == greedy.ids[:used]
    assert joined(chunks) == choice.text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    assert [i for chunk in chunks for c in chunk.choices for i in extra_of(c, "token_ids")] == greedy.ids[:used]


@pytest.mark.parametrize("include", [False, True], ids=["cut", "include_stop_str_in_output"])
def test_stop_strings(client: openai.OpenAI, greedy: Greedy, include: bool) -> None:
    """Within a token, across two and three tokens, at the very start; almost, and never."""
    pieces = greedy.pieces
    across = [pieces[n][-2:] + pieces[n + 1][:2] for n in (4, 9)]
    longer = pieces[5][-1:] + pieces[6] + pieces[7][:2]
    begins = [pieces[n] + pieces[n + 1][:-1] + "\x07" for n in range(3, 12)]  # held back, then let go
    cases = [
        *([stop] for stop in across),
        [longer],
        [pieces[8].strip()],
        [greedy.text[:3]],
        [across[1], across[0]],
        begins,
        ["\x07 never \x07"],
        [*begins, across[1]],
    ]
    together(*(lambda stops=stops: check_stop(client, greedy, stops, include) for stops in cases))


def test_stop_token_ids(client: openai.OpenAI, greedy: Greedy) -> None:
    """The token counts and is named, but is not shown unless asked for."""
    place = next(n for n in range(6, 24) if greedy.ids[n] not in greedy.ids[:n])
    token, before = greedy.ids[place], "".join(greedy.pieces[:place])
    extra = {"stop_token_ids": [token], "ignore_eos": True, "return_token_ids": True}
    cut, shown = together(
        lambda: ask(client, max_tokens=24, extra=extra),
        lambda: ask(client, max_tokens=24, extra={**extra, "include_stop_str_in_output": True}),
    )
    assert cut.choices[0].text == before
    assert shown.choices[0].text == before + greedy.pieces[place]
    for answer in (cut, shown):
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert extra_of(choice, "stop_reason") == token
        assert extra_of(choice, "token_ids") == greedy.ids[: place + 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == place + 1


def test_min_tokens(client: openai.OpenAI, greedy: Greedy) -> None:
    """Neither eos, nor a stop token, nor a stop string counts before."""
    token = greedy.ids[4]
    short, longer = together(
        lambda: chat(client, FRANCE), lambda: chat(client, FRANCE, extra={"min_tokens": 14, "return_token_ids": True})
    )
    by_id, by_text = together(
        lambda: ask(client, extra={"min_tokens": 9, "stop_token_ids": [token], "return_token_ids": True}),
        lambda: ask(client, stop=greedy.pieces[2], extra={"min_tokens": 9, "return_token_ids": True}),
    )
    assert short.choices[0].finish_reason == "stop"
    assert short.usage is not None
    assert short.usage.completion_tokens < 14
    ids = extra_of(longer.choices[0], "token_ids")
    assert len(ids) >= 14
    assert EOS not in ids[:14]
    assert token not in extra_of(by_id.choices[0], "token_ids")[:9]
    assert len(extra_of(by_text.choices[0], "token_ids")) >= 10
    assert by_text.choices[0].text.startswith("".join(greedy.pieces[:9]))


# --- chats ---


def prompt_of(client: openai.OpenAI, *messages: dict[str, str], **fields: Any) -> tuple[list[int], str]:
    """The chat's prompt as /tokenize has it, and its text."""
    tokens: list[int] = post(client, "tokenize", messages=messages, **fields)["tokens"]
    return tokens, post(client, "detokenize", tokens=tokens)["prompt"]


def turns(*messages: dict[str, str]) -> str:
    return SYSTEM + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def check_chat(client: openai.OpenAI, prompt: str, *messages: dict[str, str], **flags: Any) -> str:
    """The model sees this prompt, and goes on as /v1/completions does with it; the answer."""
    tokens, text = prompt_of(client, *messages, **flags)
    assert text == prompt
    extra = {"return_token_ids": True}
    answer, same = together(
        lambda: chat(client, *messages, extra={**flags, **extra}), lambda: ask(client, tokens, extra=extra)
    )
    assert isinstance(answer, ChatCompletion)
    assert isinstance(same, Completion)
    assert extra_of(answer, "prompt_token_ids") == extra_of(same.choices[0], "prompt_token_ids") == tokens
    assert extra_of(answer.choices[0], "token_ids") == extra_of(same.choices[0], "token_ids")
    content = answer.choices[0].message.content
    assert content == same.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    return content


def test_a_chat(client: openai.OpenAI) -> None:
    prompt = turns(FRANCE) + "<|im_start|>assistant\n"
    assert check_chat(client, prompt, FRANCE) == "The capital of France is Paris."


def test_many_turns(client: openai.OpenAI) -> None:
    talk = [FRANCE, {"role": "assistant", "content": "It is Paris."}, {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in check_chat(client, turns(*talk) + "<|im_start|>assistant\n", *talk)


def test_a_system_message_of_ones_own(client: openai.OpenAI) -> None:
    talk = [{"role": "system", "content": "You are a pirate."}, FRANCE]
    prompt = turns(*talk).removeprefix(SYSTEM) + "<|im_start|>assistant\n"
    check_chat(client, prompt, *talk)


def test_continue_final_message(client: openai.OpenAI) -> None:
    talk = [FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    answer = check_chat(client, turns(*talk).removesuffix("<|im_end|>\n"), *talk, **flags)
    assert answer.startswith(" Paris")


def test_without_a_generation_prompt(client: openai.OpenAI) -> None:
    check_chat(client, turns(FRANCE), FRANCE, add_generation_prompt=False)


# --- what comes with the text ---


def check_greedy_logprobs(values: list[float], tops: list[list[float]]) -> None:
    """The sampled token is the likeliest, and probabilities are such."""
    for value, top in zip(values, tops, strict=True):
        assert value <= 0
        assert top == sorted(top, reverse=True)
        assert value == top[0]
        assert sum(map(math.exp, top)) < 1 + 1e-4


def test_top_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer, bare = together(
        lambda: chat(client, FRANCE, logprobs=True, top_logprobs=5), lambda: chat(client, FRANCE, logprobs=True)
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert all(len(entry.top_logprobs) == 5 for entry in entries)
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)
    check_greedy_logprobs([e.logprob for e in entries], [[top.logprob for top in e.top_logprobs] for e in entries])
    shown = [entry for entry in entries if entry.token != "<|im_end|>"]
    assert "".join(entry.token for entry in shown) == choice.message.content
    assert b"".join(bytes(entry.bytes or []) for entry in shown).decode() == choice.message.content
    assert bare.choices[0].logprobs is not None
    assert [e.top_logprobs for e in bare.choices[0].logprobs.content or []] == [[]] * len(entries)
    assert [e.logprob for e in bare.choices[0].logprobs.content or []] == pytest.approx(
        [e.logprob for e in entries], abs=1e-3
    )


def test_logprobs_of_a_completion(client: openai.OpenAI, greedy: Greedy) -> None:
    answer, chunks = together(lambda: [ask(client, logprobs=3)], lambda: stream(client, logprobs=3))
    (choice,) = answer[0].choices
    whole = choice.logprobs
    assert whole is not None
    assert whole.tokens == greedy.pieces[:16]
    assert whole.text_offset == [len("".join(greedy.pieces[:n])) for n in range(16)]
    assert whole.token_logprobs is not None
    assert whole.top_logprobs is not None
    assert all(len(top) == 3 and token in top for token, top in zip(whole.tokens, whole.top_logprobs, strict=True))
    check_greedy_logprobs(whole.token_logprobs, [list(top.values()) for top in whole.top_logprobs])
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == whole.text_offset
    values = [value for part in parts for value in part.token_logprobs or []]
    assert values == pytest.approx(whole.token_logprobs, abs=1e-3)


def test_echo(client: openai.OpenAI, greedy: Greedy) -> None:
    whole, chunks, bare = together(
        lambda: [ask(client, echo=True)],
        lambda: stream(client, echo=True),
        lambda: [ask(client, echo=True, max_tokens=1, logprobs=2)],
    )
    text = TALE + "".join(greedy.pieces[:16])
    assert whole[0].choices[0].text == joined(chunks) == text
    (choice,) = bare[0].choices
    assert choice.text == TALE + greedy.pieces[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset is not None
    assert [choice.text[at:] for at in choice.logprobs.text_offset][-1] == greedy.pieces[0]


def test_logprobs_of_characters_of_several_tokens(client: openai.OpenAI) -> None:
    prompt = "Grüße, 世界! 🦜👩‍👩‍👧 é,"
    for chunks in (
        [ask(client, prompt=prompt, echo=True, max_tokens=2, logprobs=1, extra={"prompt_logprobs": 2})],
        stream(client, prompt=prompt, echo=True, max_tokens=2, logprobs=1),
    ):
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = "".join(choice.text for choice in choices)
        found = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for part in found for token in part.tokens or []]
        offsets = [offset for part in found for offset in part.text_offset or []]
        assert text.startswith(prompt)
        assert "".join(tokens) == text
        assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]
        assert "\ufffd" not in text
        if len(chunks) == 1:
            assert len(extra_of(choices[0], "prompt_logprobs")) == len(tokens) - 2


def test_return_token_ids(client: openai.OpenAI, greedy: Greedy) -> None:
    chunks = stream(client, extra={"return_token_ids": True})
    assert [i for chunk in chunks for choice in chunk.choices for i in extra_of(choice, "token_ids")] == greedy.ids[:16]
    prompt = post(client, "tokenize", prompt=TALE)["tokens"]
    assert extra_of(chunks[0].choices[0], "prompt_token_ids") == prompt
    assert post(client, "detokenize", tokens=greedy.ids)["prompt"] == greedy.text


def test_include_usage(client: openai.OpenAI) -> None:
    with_it, without, whole = together(
        lambda: stream(client, stream_options={"include_usage": True}), lambda: stream(client), lambda: [ask(client)]
    )
    usage = whole[0].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (16, usage.prompt_tokens + 16)
    assert usage.prompt_tokens == post(client, "tokenize", prompt=TALE)["count"]
    *chunks, last = with_it
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 16
    assert last.usage.prompt_tokens == usage.prompt_tokens
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert all(chunk.choices and chunk.usage is None for chunk in without)
    assert joined(with_it) == joined(without) == whole[0].choices[0].text


# --- draws ---


def drawn(answer: Completion) -> list[tuple[int, str]]:
    return [(choice.index, choice.text) for choice in answer.choices]


def test_a_seed_gives_the_same_text_twice(client: openai.OpenAI) -> None:
    free: dict[str, Any] = {"temperature": 1.0, "n": 2}
    one, again, chunks, other, zero, zero_again = together(
        lambda: [ask(client, seed=11, **free)],
        lambda: [ask(client, seed=11, **free)],
        lambda: stream(client, seed=11, **free),
        lambda: [ask(client, seed=21, **free)],
        lambda: [ask(client, seed=0, **free)],
        lambda: [ask(client, seed=0, **free)],
    )
    texts = drawn(one[0])
    assert [index for index, _ in texts] == [0, 1]
    assert texts[0][1] != texts[1][1]
    assert drawn(again[0]) == texts
    streamed = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in (0, 1)]
    assert streamed == [text for _, text in texts]
    assert not {text for _, text in drawn(other[0])} & set(streamed)
    assert drawn(zero[0]) == drawn(zero_again[0])
    usage = one[0].usage
    assert usage is not None
    assert usage.completion_tokens <= 32
    assert usage.prompt_tokens == post(client, "tokenize", prompt=TALE)["count"]


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    """The two of four that have the highest mean log-probability."""
    free: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    best, every = together(lambda: ask(client, n=2, best_of=4, **free), lambda: ask(client, n=4, logprobs=0, **free))
    ranked = sorted(every.choices, key=mean_logprob, reverse=True)
    assert drawn(best) == [(index, choice.text) for index, choice in enumerate(ranked[:2])]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.usage.prompt_tokens == every.usage.prompt_tokens


def mean_logprob(choice: CompletionChoice) -> float:
    assert choice.logprobs is not None
    values = choice.logprobs.token_logprobs
    assert values
    return sum(values) / len(values)


def test_many_prompts(client: openai.OpenAI, greedy: Greedy) -> None:
    """Choices are numbered through all prompts."""
    answer = ask(client, [TALE, "The sky is", post(client, "tokenize", prompt=TALE)["tokens"]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] == texts[4] == texts[5] == "".join(greedy.pieces[:16])
    assert texts[2] == texts[3] != texts[0]


# --- tokens and back ---

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "a\n\n\tb\r\n  c",
    "Grüße, 世界! 👩‍👩‍👧 é",
    "x" * 3000,
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x07",
    "0123456789 3.14159 1e-5",
    "",
]


def test_tokenize_and_back(client: openai.OpenAI) -> None:
    for text in TEXTS:
        found = post(client, "tokenize", prompt=text, return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 8192
        assert "Ġ" in "".join(found["token_strs"]) or " " not in text  # the vocabulary's own strings
        assert post(client, "detokenize", tokens=found["tokens"]) == {"prompt": text}
