"""The Python API in other loops and parents, and how its processes end."""

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import run

pytestmark = pytest.mark.mesh

ASYNC = """
import asyncio
from meshlm import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from meshlm.supervisor.errors import StartError
from fake_oracle import expected_token
engine = AsyncLLM.from_engine_args(AsyncEngineArgs(device="fake", max_model_len=512, fake_step_ms=10, enforce_eager=True))
prompt, tokens = [300, 301, 302], [300, 301, 302]
for _ in range(20):
    tokens.append(expected_token(tokens, engine._llm.vocab_size))
async def collect(name=None, **params):
    asked = engine.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=20, ignore_eos=True, **params), name)
    return [one async for one in asked]
async def aborted():
    found = []
    async for one in engine.generate(prompt, SamplingParams(max_tokens=400, ignore_eos=True), "x"):
        found.append(one)
        if len(found) == 3:
            await engine.abort(["x", "nobody"])
    return found
async def main():
    so_far, delta, (final,) = await asyncio.gather(
        collect("a"), collect(output_kind=RequestOutputKind.DELTA, n=2), collect(output_kind=RequestOutputKind.FINAL_ONLY))
    assert so_far[-1].outputs == final.outputs and final.outputs[0].token_ids == tokens[3:], so_far[-1]
    assert [one.finished for one in so_far] == [False] * (len(so_far) - 1) + [True] and so_far[0].request_id == "a"
    assert len(so_far) > 5 and [one.finished for one in delta].count(True) == 1
    for index in range(2):
        pieces = [output for one in delta for output in one.outputs if output.index == index]
        assert [token for piece in pieces for token in piece.token_ids] == tokens[3:]
        assert "".join(piece.text for piece in pieces) == final.outputs[0].text
    last = (await asyncio.wait_for(aborted(), 30))[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort", last
    async for one in engine.generate(prompt, SamplingParams(max_tokens=400, ignore_eos=True), "x"):
        break  # who stops reading aborts it
    async with asyncio.timeout(30):
        while engine._llm._client.mesh_client.tracker.by_handle:
            await asyncio.sleep(0.01)
    try:
        await anext(engine.generate([1] * 600))
    except ValueError as error:
        assert "maximum context length is 512" in str(error)
    else:
        raise AssertionError("too long a prompt was taken")
    assert await engine.reset_prefix_cache() and engine.is_running
    await engine.check_health()
    running = asyncio.ensure_future(aborted())
    while not engine._llm._client.mesh_client.tracker.by_handle:
        await asyncio.sleep(0.001)
    running.cancel()
    running = asyncio.ensure_future(collect("y"))
    while not engine._llm._client.mesh_client.tracker.by_handle:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.shutdown)
    try:
        await asyncio.wait_for(running, 30)
    except StartError as error:
        assert engine.errored
    else:
        raise AssertionError("an answer of nobody")
asyncio.run(main())
print("done")
"""


def test_async(tmp_path: Path) -> None:
    run(tmp_path, ASYNC)


PARENTS = """
import asyncio, dataclasses, multiprocessing, os
from meshlm import LLM, EngineArgs, SamplingParams
ARGS = EngineArgs(device="fake", max_model_len=64)
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
def answer(llm):
    return llm.generate([300, 301], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
def child(queue):
    queue.put(answer(LLM(**dataclasses.asdict(ARGS))))
def asked(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join(30)
    assert process.exitcode == 0, process.exitcode
    return found
async def notebook():
    return answer(LLM.from_engine_args(ARGS))  # a cell of a notebook runs in an event loop
if __name__ == "__main__":
    found = asyncio.run(notebook())
    assert asked("spawn") == asked("fork") == found
    llm = LLM.from_engine_args(ARGS)
    if not (pid := os.fork()):
        try:
            answer(llm)
        except RuntimeError as error:
            assert "belongs to the process that made it" in str(error)
            llm.shutdown()
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert answer(llm) == found
    print("done")
"""


def test_parents_of_all_kinds(tmp_path: Path) -> None:
    """A running event loop, children that are spawned and forked, and a fork of the program that has the mesh."""
    run(tmp_path, PARENTS)


ENDS = """
import gc, os
from meshlm import LLM, SamplingParams
def pids(llm):
    return [process.pid for process in llm._background.supervisor.status().processes if process.role != "supervisor"]
def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
one, two = LLM(device="fake"), LLM(device="fake")
of_one, of_two = pids(one), pids(two)
assert alive(of_one) and alive(of_two)
del one
gc.collect()
assert not alive(of_one) and alive(of_two)
assert two.generate([300, 301], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished
two.shutdown()
two.shutdown()
assert not alive(of_two)
try:
    two.encode(["hi"])
except RuntimeError as error:
    assert str(error) == "this LLM was shut down"
else:
    raise AssertionError("an answer of nobody")
print("done")
"""


def test_the_processes_end_with_their_object(tmp_path: Path) -> None:
    """As with vLLM: `del llm` frees the GPU."""
    run(tmp_path, ENDS)


INTERRUPTED = """
import _thread, signal
from meshlm import LLM
from meshlm.supervisor.cli.display import StartDisplay
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
line = StartDisplay.line
def interrupting(self, text):
    line(self, text)
    if "coordinator/0 is ready" in text:
        _thread.interrupt_main()
StartDisplay.line = interrupting
try:
    LLM(device="fake")
except KeyboardInterrupt:
    print("done")
"""


def test_ctrl_c_ends_a_start(tmp_path: Path) -> None:
    """Without a word but the interrupt: no task or process is left behind."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "never retrieved" not in done.stderr
    assert "destroyed" not in done.stderr
