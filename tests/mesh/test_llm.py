"""The Python API: the same engine, no HTTP, no `__main__` guard."""

import os
from pathlib import Path

import pytest
from scripts import run
from start_plugin import DIES_AT_START, install

pytestmark = pytest.mark.mesh

SCRIPT = """
from meshlm import LLM, SamplingParams
llm = LLM(device="fake", max_model_len="512", trust_remote_code=True, quantization=None, served_model_name="mine",
          scheduling_policy="priority", reasoning_parser="qwen3", enable_prompt_embeds=True,
          enable_sleep_mode=True, worker_extension_cls="string.Formatter")
prompts = [[300, 301, 302], [400, 401]]
one, two = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, n=2))
from fake_oracle import expected_token
def after(prompt, count):
    found = list(prompt)
    for _ in range(count):
        found.append(expected_token(found, llm.vocab_size))
    return found[len(prompt):]
tokens = [300, 301, 302, *after([300, 301, 302], 6)]
assert one.outputs[0].token_ids == tokens[3:], one
assert one.outputs[1].token_ids == tokens[3:]
assert one.finished and one.outputs[0].finish_reason == "length"
assert two.prompt_token_ids == [400, 401]
from meshlm.supervisor.api.metrics import Counter, Histogram
figures = {(figure.name, figure.labels.get("finished_reason")): figure for figure in llm.get_metrics()}
assert all(figure.labels["model_name"] == "mine" and figure.labels["engine"] == "0" for figure in figures.values())
assert figures["meshlm:prompt_tokens", None] == Counter("meshlm:prompt_tokens", {"model_name": "mine", "engine": "0"}, 10)
assert figures["meshlm:generation_tokens", None].value == 24
assert figures["meshlm:request_success", "length"].value == 4
assert figures["meshlm:num_requests_running", None].value == 0
assert figures["meshlm:prefix_cache_queries", None].value > 0
assert isinstance(figures["meshlm:time_to_first_token_seconds", None], Histogram)
assert figures["meshlm:time_to_first_token_seconds", None].count == 4
assert llm.collective_rpc("format", args=["{}-{x}", 1], kwargs={"x": 2}) == ["1-2"]
try:
    llm.collective_rpc("reload_all_weights")
except ValueError as error:
    assert "Formatter has no 'reload_all_weights'" in str(error), error
else:
    raise AssertionError("it was called")
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
llm.wake_up()
(again,) = llm.generate([[300, 301, 302]], SamplingParams(max_tokens=6, ignore_eos=True))
assert again.outputs[0].token_ids == tokens[3:]
(chat,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))
assert len(chat.outputs[0].token_ids) == 3 and chat.prompt.endswith("assistant\\n")
(one,) = llm.generate({"prompt_token_ids": [300, 301, 302]}, SamplingParams(max_tokens=2, ignore_eos=True))
assert one.outputs[0].token_ids == tokens[3:5]
one, two = llm.generate([{"prompt": "hi"}, "hi"], priority=[1, 0], use_tqdm=False)
assert one.prompt_token_ids == two.prompt_token_ids == llm.encode(["hi"])[0]
tokenizer = llm.get_tokenizer()
assert tokenizer.decode(tokenizer.encode("hi there")) == "hi there"
assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True) == chat.prompt
for wrong in ({"text": "hi"}, ["a", None], [[1.5]], {"prompt": "hi", "multi_modal_data": {"image": 1}}):
    try:
        llm.generate(wrong)
    except ValueError as error:
        assert str(error).startswith("a prompt"), error
    else:
        raise AssertionError(wrong)
(end,) = llm.generate([[300, 301] * 250], SamplingParams(max_tokens=100, min_tokens=50, ignore_eos=True))
assert (len(end.outputs[0].token_ids), end.outputs[0].finish_reason) == (12, "length"), end
assert llm.generate([]) == llm.chat([]) == llm.wait_for_completion() == []
assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
short = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
llm.sleep(level=0)
names = llm.enqueue(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
names += llm.enqueue_chat([{"role": "user", "content": "hi"}], short, add_generation_prompt=True)
llm.wake_up(tags=["scheduling"])
first, second, third = llm.wait_for_completion(use_tqdm=False)
assert [first.request_id, second.request_id, third.request_id] == names
assert first.outputs[0].token_ids == tokens[3:] and second.outputs[0].token_ids == after([400, 401], 6)
assert len(third.outputs[0].token_ids) == 2 and third.outputs[0].text == "" and third.prompt == chat.prompt
assert llm.wait_for_completion() == []
for wrong in (lambda: llm.enqueue([[1.5]]), lambda: llm.wait_for_completion(int), lambda: llm.enqueue("a", lora_request=1)):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("it was taken")
llm.enqueue([[300]], SamplingParams(max_tokens=3, ignore_eos=True))
llm.enqueue([[300] * 600], short)
try:
    llm.wait_for_completion(use_tqdm=False)
except ValueError as error:
    assert "600" in str(error), error
else:
    raise AssertionError("it is longer than the context")
from meshlm import StructuredOutputsParams
kinds = (StructuredOutputsParams(choice=["left", "right"]), StructuredOutputsParams(regex="[a-c]{3}[0-9]"))
one, two = llm.generate([[300, 301]] * 2, [SamplingParams(structured_outputs=kind) for kind in kinds])
assert one.outputs[0].text in ("left", "right") and one.outputs[0].finish_reason == "stop", one
assert set(two.outputs[0].text[:3]) <= set("abc") and two.outputs[0].text[3:].isdigit(), two
try:
    llm.generate("hi", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a")))
except ValueError as error:
    assert "unclosed group" in str(error), error
else:
    raise AssertionError("it was taken")
from meshlm import BeamSearchParams
beams = llm.beam_search([[300, 301], {"prompt": "hi"}], BeamSearchParams(beam_width=3, max_tokens=4))
assert [len(one.sequences) for one in beams] == [3, 3], beams
assert all(one.tokens[:2] == [300, 301] and len(one.tokens) == 6 == 2 + len(one.logprobs) for one in beams[0].sequences)
assert len({tuple(one.tokens) for one in beams[0].sequences}) == 3
scores = [one.cum_logprob for one in beams[0].sequences]
assert scores == sorted(scores, reverse=True) and beams[0].sequences[0].text == tokenizer.decode(beams[0].sequences[0].tokens)
salted = [{"prompt_token_ids": [300] * 40, "prompt": "text", "cache_salt": salt} for salt in ("a", "b", "a")]
cached = [llm.generate(one, SamplingParams(max_tokens=1), use_tqdm=False)[0] for one in salted]
assert [(one.num_cached_tokens, one.prompt) for one in cached] == [(0, "text"), (0, "text"), (32, "text")], cached
(silent,) = llm.generate("hi", SamplingParams(max_tokens=3, detokenize=False))
assert len(silent.outputs[0].token_ids) == 3 and not silent.outputs[0].text and silent.metrics is None
(short,) = llm.generate("one two three four", SamplingParams(max_tokens=1), tokenization_kwargs={"truncate_prompt_tokens": 2})
assert len(short.prompt_token_ids) == 2
image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
for call in (
    lambda: llm.chat([{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]),
    lambda: llm.generate("hi", lora_request="mine"),
    lambda: llm.generate("hi", []),
    lambda: llm.generate("hi", tokenization_kwargs={"padding": True}),
):
    try:
        call()
    except ValueError as error:
        assert any(word in str(error) for word in ("image_url", "lora_request", "sampling_params", "padding")), error
    else:
        raise AssertionError("it was ignored")
try:
    llm.generate([[1] * 600])
except ValueError as error:
    assert "maximum context length is 512" in str(error)
else:
    raise AssertionError("too long a prompt was taken")
texts = [f"Once {number} upon a time" for number in range(40)]
for text, output in zip(texts, llm.generate(texts, SamplingParams(max_tokens=2, ignore_eos=True))):
    ids = output.prompt_token_ids
    assert output.prompt == text and [ids] == llm.encode([text]), output
    assert output.outputs[0].token_ids[0] == expected_token(ids, llm.vocab_size)
try:
    llm.generate([*[[300, 301]] * 40, ["no id"]], SamplingParams(max_tokens=400, ignore_eos=True))
except ValueError as error:
    assert "a prompt is text, token ids" in str(error) and not llm._client.mesh_client.tracker.by_handle
else:
    raise AssertionError("a prompt of anything was taken")
budget = SamplingParams(max_tokens=12, ignore_eos=True, thinking_token_budget=5)
opened, closed = llm.generate(["Why? <think>", "<think></think> Why?"], budget)
ids = tokenizer.encode("Why? <think>")
assert opened.outputs[0].token_ids[:6] == [*(token for token in after(ids, 5)), tokenizer.encode("</think>")[0]], opened
assert "</think>" in opened.outputs[0].text and "</think>" not in closed.outputs[0].text, (opened, closed)
import torch
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.workers.fake.tokens import tokens_of_embeds
rows = torch.randn(9, 576)
(vectors,) = llm.generate({"prompt_embeds": rows}, SamplingParams(max_tokens=6, ignore_eos=True))
embeds = PromptEmbeds("float32", ((0, 9),), rows.numpy().tobytes())
assert vectors.outputs[0].token_ids == after(tokens_of_embeds(embeds, llm.vocab_size), 6) and vectors.prompt_token_ids == []
(again,) = llm.generate([300, 301, 302], SamplingParams(max_tokens=6, ignore_eos=True))
assert again.outputs[0].token_ids == tokens[3:] and again.prompt is None, again
print("done")
"""


KILLS = """
import os, signal, threading, time
from meshlm import LLM, SamplingParams
from fake_oracle import expected_token
llm = LLM(device="fake", max_model_len="512", fake_step_ms=10)
def kill_all():
    for role in ("detokenizer", "scheduler", "worker", "coordinator"):
        for pid in [process.pid for process in llm._background.supervisor.status().processes if process.role == role]:
            os.kill(pid, signal.SIGKILL)
            while any(process.pid == pid or process.state != "ready" for process in llm._background.supervisor.status().processes):
                time.sleep(0.01)
def kill_when_tokens_flow():
    while not any(choice.token_ids for choice in list(llm._client.mesh_client.tracker.by_handle.values())):
        time.sleep(0.01)
    kill_all()
killer = threading.Thread(target=kill_when_tokens_flow, daemon=True)
killer.start()
prompts = [[300 + number, 301] for number in range(20)]
params = SamplingParams(max_tokens=500, ignore_eos=True, n=2)
for prompt, answer in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
    tokens = list(prompt)
    while len(tokens) < 502:
        tokens.append(expected_token(tokens, llm.vocab_size))
    assert [output.token_ids for output in answer.outputs] == [tokens[2:]] * 2
    assert {output.finish_reason for output in answer.outputs} == {"length"}
killer.join()
killer = threading.Thread(target=kill_all, daemon=True)
killer.start()
while killer.is_alive():
    assert llm.encode(["hi there"]) == llm.encode(["hi there"])
print("done")
"""


POOLED = """
import os, signal, threading, time
import numpy as np
from meshlm import LLM
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import RequestId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.edges.text import Submit, TokenPrompt
from meshlm.supervisor.api.client import Sent
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput
from fake_oracle import expected_vector
llm = LLM(device="fake", max_model_len="512", max_num_batched_tokens=64, max_num_seqs=8, kv_cache_memory="60M", fake_step_ms=10)
def ask(number, prompt, kind):
    submit = Submit((llm._client.new_handle(),), (RequestId(f"p{number}"),), TokenPrompt(pack_i32(prompt)), SamplingParams(),
        extras=(Pool(kind),), arrival_s=time.time())
    return Sent(submit, RequestOutput(f"p{number}", None, prompt, [CompletionOutput(0)]))
def kill_all():
    for role in ("detokenizer", "scheduler", "worker", "coordinator"):
        for pid in [process.pid for process in llm._background.supervisor.status().processes if process.role == role]:
            os.kill(pid, signal.SIGKILL)
            while any(process.pid == pid or process.state != "ready" for process in llm._background.supervisor.status().processes):
                time.sleep(0.01)
kinds = list(PoolKind)
asked = [([300 + number] + list(range(300, 811 - number)), kinds[number % len(kinds)]) for number in range(30)]
assert len(asked[0][0]) == 512
killer = threading.Thread(target=kill_all, daemon=True)
killer.start()
answers = llm._background.ask(llm._client.run([ask(n, *one) for n, one in enumerate(asked)], None))
for (prompt, kind), answer in zip(asked, answers):
    (output,) = answer.outputs
    assert np.frombuffer(output.pooled, np.float32).tolist() == expected_vector(prompt, kind), (len(prompt), kind)
    assert (output.finish_reason, output.stop_reason, output.token_ids, output.text) == ("stop", None, [], "")
killer.join()
for number, kind in ((50, PoolKind.LAST), (51, PoolKind.MEAN)):
    (answer,) = llm._background.ask(llm._client.run([ask(number, asked[0][0], kind)], None))
    (answer,) = llm._background.ask(llm._client.run([ask(number + 10, asked[0][0], kind)], None))
    assert answer.num_cached_tokens == (496 if kind is PoolKind.LAST else 0), answer.num_cached_tokens
    assert np.frombuffer(answer.outputs[0].pooled, np.float32).tolist() == expected_vector(asked[0][0], kind)
try:
    llm._background.ask(llm._client.run([ask(99, [300] * 513, PoolKind.LAST)], None))
except ValueError as error:
    assert "maximum context length is 512 tokens, and the prompt has 513" in str(error), error
else:
    raise AssertionError("it does not fit")
print("done")
"""


GIVEN_UP = """
import os, pathlib, signal, sys, threading
from meshlm import LLM, SamplingParams
from meshlm.supervisor.errors import StartError
llm = LLM(device="fake", fake_step_ms=5, max_restarts=1, detokenizers=1)
role, wish = os.environ["ROLE"], pathlib.Path(os.environ["DIES_AT_START"])
(pid,) = [pid for identity, pid in llm._background.supervisor._incarnations.pids().items() if identity.role.value == role]
def kill():
    wish.write_text(role)
    os.kill(pid, signal.SIGKILL)
if os.environ["BUSY"]:
    threading.Timer(0.5, kill).start()
else:
    kill()
try:
    llm.generate([300, 301], SamplingParams(max_tokens=8000, ignore_eos=True), use_tqdm=False)
except StartError as error:
    assert f"{role}/0 died 2 times" in str(error), error
    assert "signal 11" in str(error), error
else:
    raise AssertionError("an answer of a mesh that cannot be kept alive")
llm.shutdown()
print("done")
"""


ALL_READY = """
from meshlm import LLM
llm = LLM(device="fake", detokenizers=4)
assert {process.state for process in llm._background.supervisor.status().processes} == {"ready"}
print("done")
"""


FULL = """
from meshlm import LLM, SamplingParams
from fake_oracle import expected_token
llm = LLM(device="fake", max_model_len="512", max_waiting=4, max_num_seqs=2)
prompts = [[300 + number, 301] for number in range(100)]
for prompt, answer in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True, n=2), use_tqdm=False)):
    assert [output.token_ids for output in answer.outputs] == [[expected_token(prompt, llm.vocab_size)]] * 2
print("done")
"""


def test_a_full_queue_makes_a_script_wait(tmp_path: Path) -> None:
    run(tmp_path, FULL)


def test_all_processes_are_ready_from_the_first_call_on(tmp_path: Path) -> None:
    """One that died before would have ended the start, although requests were served."""
    run(tmp_path, ALL_READY)


def test_a_plain_script(tmp_path: Path) -> None:
    run(tmp_path, SCRIPT)


def test_generate_outlives_any_process(tmp_path: Path) -> None:
    """All that an `LLM` starts is killed, one after the other, while it generates, and again while it tokenizes."""
    run(tmp_path, KILLS)


@pytest.mark.parametrize(
    ("role", "busy"), [("worker", ""), ("worker", "busy"), ("scheduler", "busy"), ("detokenizer", "busy")]
)
def test_a_mesh_that_gives_up_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, busy: str
) -> None:
    """With its reason: nobody would answer any more. What dies at its start dies of no request, whoever waits elsewhere."""
    paths = [str(install(tmp_path)), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(DIES_AT_START, str(tmp_path / "who"))
    monkeypatch.setenv("ROLE", role)
    monkeypatch.setenv("BUSY", busy)
    run(tmp_path, GIVEN_UP)


def test_vectors_of_prompts_although_processes_die(tmp_path: Path) -> None:
    """Of KV that is really theirs: in chunks, with little memory; every role but ours is killed once."""
    run(tmp_path, POOLED)
