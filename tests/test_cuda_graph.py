"""The grouped GEMMs in CUDA graphs: no syncs, new offsets between replays, first use inside a capture.

A test called after a case (h17, ..) is a defect that users of another package met once. Where a case needs a
process whose first use of CUDA it is, the body of that process is a function ``process_..`` of this module.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
import reference
import torch
from forms import NAN, same_bits
from gpu import DEVICE, PRODUCTS, Problem, check, check_all, finish, problem, start, wait
from torch import Tensor

import cake_ops
from cake_ops.cuda.tensor_map import MAX_ADDRESSES

pytestmark = pytest.mark.gpu

SIZES = [97, 0, 64, 1, 138]
OTHER_SIZES = ([0, 300, 0, 0, 0], [60, 60, 60, 60, 60], [0, 0, 0, 0, 0], [1, 2, 290, 3, 4], SIZES)


def step(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a forward and backward pass."""
    x, w = p.x.detach().requires_grad_(), p.w.detach().requires_grad_()
    y = cake_ops.grouped_mm(x, w, p.offs)
    return (y.detach(), *torch.autograd.grad(y, (x, w), p.g))


def capture(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def check_step(p: Problem, results: tuple[Tensor, ...]) -> None:
    for name, result in zip(PRODUCTS, results, strict=True):
        check(result, p.expected(name))


def renew(p: Problem, sizes: list[int]) -> None:
    """Other values and other offsets in the same memory."""
    for t in (p.x, p.w, p.g):
        t.normal_()
    p.offs.copy_(reference.offsets(sizes))


def test_h17_nothing_waits_for_the_device() -> None:
    p = problem(SIZES, 136, 72, tail=5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step(p)  # a new geometry, and one that is known
        results = step(p)
        dw = p.run("grouped_mm_wgrad", out_dtype=torch.float32)
        cake_ops.grouped_mm_wgrad_(dw, p.g, p.x, p.offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_step(p, results)
    check(dw, 2 * p.expected("grouped_mm_wgrad"))


def test_h17_replays_honour_new_offsets() -> None:
    p = problem(SIZES, 136, 72)
    step(p)
    graph, results = capture(lambda: step(p))
    for sizes in OTHER_SIZES:
        renew(p, sizes)
        graph.replay()
        check_step(p, results)


@pytest.mark.parametrize("name", PRODUCTS)
def test_prepared_launch_in_a_graph(name: str) -> None:
    p = problem(SIZES, 136, 72)
    prepared = cake_ops.prepare(name, *p.tensors(name))
    graph, out = capture(prepared.launch)
    for sizes in OTHER_SIZES:
        renew(p, sizes)
        prepared.out.fill_(NAN)
        graph.replay()
        assert out is prepared.out
        check(out, p.expected(name))


def test_accumulation_in_a_graph_adds_at_each_replay() -> None:
    p = problem(SIZES, 136, 72)
    main_grad = torch.zeros(5, 136, 72, device=DEVICE)
    graph, _ = capture(lambda: cake_ops.grouped_mm_wgrad_(main_grad, p.g, p.x, p.offs))
    main_grad.zero_()
    for _ in range(3):
        graph.replay()
    check(main_grad, 3 * p.expected("grouped_mm_wgrad"))


def test_padded_and_copied_operands_in_a_graph() -> None:
    """Sizes that are no multiples of 8, so copies and temporaries lie in the graph's own memory."""
    p = problem(SIZES, 100, 63)
    graph, results = capture(lambda: step(p))
    for sizes in OTHER_SIZES:
        renew(p, sizes)
        torch.full((1 << 20,), NAN, device=DEVICE)  # dirties what eager calls would get
        graph.replay()
        check_step(p, results)


@pytest.mark.parametrize("warm", ["never", "on-another-stream"])
def test_h55_two_graphs_and_eager_calls_in_turn(warm: str) -> None:
    p, q = problem(SIZES, 136, 72), problem(SIZES, 136, 72)
    cake_ops.clear_caches()
    if warm == "on-another-stream":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(p)
        torch.cuda.current_stream().wait_stream(side)
    first, of_first = capture(lambda: step(p))
    second, of_second = capture(lambda: step(q))
    for sizes in OTHER_SIZES:
        renew(p, sizes)
        renew(q, sizes[::-1])
        first.replay()
        eager = step(q)
        second.replay()
        check_step(p, of_first)
        check_step(q, of_second)
        assert all(same_bits(a, b) for a, b in zip(eager, of_second, strict=True))


def test_h56_a_graph_outlives_its_neighbour_on_the_same_stream() -> None:
    p = problem(SIZES, 136, 72)
    step(p)
    stream = torch.cuda.Stream()
    train, evaluate = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(train, stream=stream):
        results = step(p)
    with torch.cuda.graph(evaluate, stream=stream):
        y = p.run("grouped_mm")
    evaluate.replay()
    check(y, p.expected("grouped_mm"))
    evaluate.reset()
    del evaluate, y
    torch.cuda.empty_cache()
    for sizes in OTHER_SIZES:
        renew(p, sizes)
        train.replay()
        check_step(p, results)


def test_a_graph_does_not_need_the_caches() -> None:
    """Plans, tensor maps and argument blocks go; what was captured stays."""
    p = problem(SIZES, 136, 72)
    graph, results = capture(lambda: step(p))
    for x in [p.x.clone() for _ in range(2 * MAX_ADDRESSES)]:
        cake_ops.grouped_mm(x, p.w, p.offs)
    cake_ops.clear_caches()
    renew(p, OTHER_SIZES[1])
    graph.replay()
    check_step(p, results)


def test_h32_replays_have_the_same_bits() -> None:
    p = problem([100, 0, 257, 1, 640], 520, 1000)
    graph, results = capture(lambda: step(p))
    graph.replay()
    first = [result.clone() for result in results]
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(100):
        graph.replay()
        for result, bits in zip(results, first, strict=True):
            differs |= (result.view(torch.int16) != bits.view(torch.int16)).any()
    wait()
    assert not differs
    check_step(p, results)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
def test_launches_that_feed_each_other_wait_for_each_other(graphed: bool) -> None:
    """A kernel may start before the one ahead of it ends (PDL), but neither reads nor writes so early."""
    p = problem([64] * 8, 1024, 1024)
    p.w.div_(32)
    there = cake_ops.prepare("grouped_mm", p.x, p.w, p.offs, out=p.g)
    back = cake_ops.prepare("grouped_mm", p.g, p.w, p.offs, out=p.x)
    start = p.x.clone()
    for _ in range(20):
        for launch in (there.launch, back.launch):
            launch()
            wait()
    expected = p.x.clone()
    assert expected.isfinite().all() and expected.std() > 0.1

    def chain() -> None:
        for _ in range(20):
            there.launch()
            back.launch()

    run = capture(chain)[0].replay if graphed else chain
    for _ in range(20):
        p.x.copy_(start)
        run()
        assert same_bits(p.x, expected)


# First use of the package in a process


def _first_use(
    run: Callable[[Problem], tuple[Tensor, ...]], before: Callable[[Problem], object], refuses: bool
) -> None:
    """Captures ``run`` after ``before``: it works, or refuses by naming the warm-up and harms nothing."""
    p = problem(SIZES, 136, 72)
    before(p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refusal, results = None, ()
    try:
        with torch.cuda.graph(graph):
            try:
                results = run(p)
            except RuntimeError as error:
                refusal = error
    except RuntimeError as error:
        assert refusal is not None, f"the capture is broken without a word: {error}"
    if refusal is None:
        renew(p, OTHER_SIZES[1])
        graph.replay()
        for name, result in zip(PRODUCTS, results, strict=False):
            check(result, p.expected(name))
    else:
        assert refuses and "cake_ops.warmup()" in str(refusal), refusal
    print("worked" if refusal is None else f"refused: {refusal}")
    check_all(p)


def process_forward() -> None:
    _first_use(lambda p: (p.run("grouped_mm"),), lambda p: None, refuses=True)


def process_step() -> None:
    _first_use(step, lambda p: None, refuses=True)


def process_step_after_a_forward() -> None:
    _first_use(step, lambda p: p.run("grouped_mm"), refuses=True)


def process_step_after_a_warmup() -> None:
    _first_use(step, lambda p: cake_ops.warmup(), refuses=False)


PROCESSES = {
    "forward": process_forward,
    "step": process_step,
    "step-after-a-forward": process_step_after_a_forward,
    "step-after-a-warmup": process_step_after_a_warmup,
}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once, and before the tests above: most of their time is the import of torch."""
    running = {name: start(function) for name, function in PROCESSES.items()}
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("name", PROCESSES)
def test_h57_first_use_inside_a_capture(
    processes: dict[str, subprocess.Popen[str]], name: str
) -> None:
    output = finish(processes[name])
    assert "worked" in output or "refused" in output
    print(output)
