"""Two pieces of work beside one another: both come after what was there, and before what follows."""

import pytest
import torch

from meshlm.workers.attention.aux_stream import AuxStream


def test_without_a_gpu_one_runs_after_the_other() -> None:
    done: list[str] = []
    AuxStream(torch.device("cpu")).both(lambda: done.append("first"), lambda: done.append("second"))
    assert done == ["first", "second"]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_both_see_what_was_before_and_are_seen_behind(captured: bool) -> None:
    """Also as a part of a graph, replayed; the products are long enough that an order that is not kept shows."""
    side = AuxStream(torch.device("cuda", 0))
    given = torch.randn(4096, 4096, device="cuda") / 64
    start, left, right, total = (torch.zeros_like(given) for _ in range(4))

    def work() -> None:
        torch.mm(given, given, out=start)
        for _ in range(3):
            side.both(lambda: torch.add(start, 1.0, out=left), lambda: torch.mm(start, given, out=right))
            torch.add(left, right, out=total)
            start.copy_(total)

    expected = given @ given
    for _ in range(3):
        expected = (expected + 1.0) + expected @ given
    work()
    torch.cuda.synchronize()
    torch.testing.assert_close(total, expected, atol=1e-3, rtol=1e-4)
    if captured:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            work()
            graph.capture_end()
        for _ in range(3):
            total.zero_()
            graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(total, expected, atol=1e-3, rtol=1e-4)
