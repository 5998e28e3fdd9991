"""The kernels in CUDA graphs: no syncs, new values and offsets between replays, first use inside a capture.

A test called after a case (h17, ..) is a defect that users of another package met once. Where a case needs a
process whose first use of CUDA it is, the body of that process is a function ``process_..`` of this module.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from forms import NAN, same_bits
from gpu import (
    DEVICE,
    FP32,
    KERNEL_FAMILIES,
    KERNEL_PRODUCTS,
    OTHER_SIZES,
    SIZES,
    Problem,
    check,
    check_all,
    finish,
    problem,
    router,
    small,
    small_of,
    started,
    wait,
)
from torch import Tensor

import cake_ops
from cake_ops.cuda.tensor_map import MAX_ADDRESSES

pytestmark = pytest.mark.gpu

each_family = pytest.mark.parametrize("family", KERNEL_FAMILIES)


def capture(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def add_wgrad(p: Problem, out: Tensor) -> Tensor:
    """``out`` plus the weight gradient of ``p``, in place."""
    wgrad = p.products[2]
    return getattr(cake_ops, f"{wgrad}_")(out, *p.tensors(wgrad))


@each_family
def test_h17_nothing_waits_for_the_device(family: str) -> None:
    p = problem(SIZES, 136, 72, tail=5) if family == "grouped_mm" else small(family)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = p.step()  # a new geometry, and one that is known
        results = p.step()
        dw = p.run(p.products[2], out_dtype=FP32)
        add_wgrad(p, dw)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    p.check_step(results)
    check(dw, 2 * p.expected(p.products[2]), p.fp32_bound)


@each_family
def test_h17_replays_honour_new_values_and_offsets(family: str) -> None:
    p = small(family)
    p.step()
    graph, results = capture(p.step)
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        graph.replay()
        p.check_step(results)


@pytest.mark.parametrize("name", KERNEL_PRODUCTS)
def test_prepared_launch_in_a_graph(name: str) -> None:
    p = small_of(name)
    prepared = cake_ops.prepare(name, *p.tensors(name))
    graph, out = capture(prepared.launch)
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        prepared.out.fill_(NAN)
        graph.replay()
        assert out is prepared.out
        p.check(name, out)


@each_family
def test_accumulation_in_a_graph_adds_at_each_replay(family: str) -> None:
    p = small(family)
    main_grad = torch.zeros(p.w.shape, device=DEVICE)
    graph, _ = capture(lambda: add_wgrad(p, main_grad))
    main_grad.zero_()
    for _ in range(3):
        graph.replay()
    check(main_grad, 3 * p.expected(p.products[2]), p.fp32_bound)


@each_family
def test_padded_and_copied_operands_in_a_graph(family: str) -> None:
    """Sizes that tensor maps do not take, so copies and temporaries lie in the graph's own memory."""
    p = problem(SIZES, 100, 63) if family == "grouped_mm" else router(300, 99, 63)
    graph, results = capture(p.step)
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        torch.full((1 << 20,), NAN, device=DEVICE)  # dirties what eager calls would get
        graph.replay()
        p.check_step(results)


@pytest.mark.parametrize("warm", ["never", "on-another-stream"])
@each_family
def test_h55_two_graphs_and_eager_calls_in_turn(family: str, warm: str) -> None:
    p, q = small(family), small(family)
    cake_ops.clear_caches()
    if warm == "on-another-stream":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            p.step()
        torch.cuda.current_stream().wait_stream(side)
    first, of_first = capture(p.step)
    second, of_second = capture(q.step)
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        q.renew(sizes[::-1])
        first.replay()
        eager = q.step()
        second.replay()
        p.check_step(of_first)
        q.check_step(of_second)
        assert all(same_bits(a, b) for a, b in zip(eager, of_second, strict=True))


@each_family
def test_h56_a_graph_outlives_its_neighbour_on_the_same_stream(family: str) -> None:
    p = small(family)
    p.step()
    stream = torch.cuda.Stream()
    train, evaluate = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(train, stream=stream):
        results = p.step()
    with torch.cuda.graph(evaluate, stream=stream):
        y = p.run(family)
    evaluate.replay()
    p.check(family, y)
    evaluate.reset()
    del evaluate, y
    torch.cuda.empty_cache()
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        train.replay()
        p.check_step(results)


@each_family
def test_a_graph_does_not_need_the_caches(family: str) -> None:
    """Plans, tensor maps and argument blocks go; what was captured stays."""
    p = small(family)
    graph, results = capture(p.step)
    for x in [p.x.clone() for _ in range(2 * MAX_ADDRESSES)]:
        p.forward(x, p.w)
    cake_ops.clear_caches()
    p.renew(OTHER_SIZES[1])
    graph.replay()
    p.check_step(results)


@each_family
def test_h32_replays_have_the_same_bits(family: str) -> None:
    grouped = family == "grouped_mm"
    p = problem([100, 0, 257, 1, 640], 520, 1000) if grouped else router(998, 256, 1000)
    graph, results = capture(p.step)
    graph.replay()
    first = [result.clone() for result in results]
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(100):
        graph.replay()
        for result, bits in zip(results, first, strict=True):
            differs |= (result.view(torch.int32) != bits.view(torch.int32)).any()
    wait()
    assert not differs
    p.check_step(results)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("form", ["", "_dgrad"], ids=["fwd", "dgrad"])
@each_family
def test_launches_that_feed_each_other_wait_for_each_other(
    family: str, form: str, graphed: bool
) -> None:
    """A kernel may start before the one ahead of it ends (PDL), but neither reads nor writes so early."""
    p = problem([64] * 8, 1024, 1024) if family == "grouped_mm" else router(512, 512, 512)
    p.w.div_(p.w.shape[-1] ** 0.5)
    there = cake_ops.prepare(family, *p.tensors(family), out=p.g)
    back = cake_ops.prepare(family + form, p.g, *p.tensors(family)[1:], out=p.x)
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
    family: str,
    run: Callable[[Problem], tuple[Tensor, ...]],
    before: Callable[[Problem], object],
    refuses: bool,
) -> None:
    """Captures ``run`` after ``before``: it works, or refuses by naming the warm-up and harms nothing."""
    p = small(family)
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
        p.renew(OTHER_SIZES[1])
        graph.replay()
        for name, result in zip(p.products, results, strict=False):
            p.check(name, result)
    else:
        assert refuses and "cake_ops.warmup()" in str(refusal), refusal
    print("worked" if refusal is None else f"refused: {refusal}")
    check_all(p)


def process_forward(family: str) -> None:
    _first_use(family, lambda p: (p.run(family),), lambda p: None, refuses=True)


def process_step(family: str) -> None:
    _first_use(family, Problem.step, lambda p: None, refuses=True)


def process_step_after_a_forward(family: str) -> None:
    _first_use(family, Problem.step, lambda p: p.run(family), refuses=True)


def process_step_after_a_warmup(family: str) -> None:
    _first_use(family, Problem.step, lambda p: cake_ops.warmup(), refuses=False)


PROCESSES = {
    f"{family}-{function.__name__.removeprefix('process_')}": (function, family)
    for family in KERNEL_FAMILIES
    for function in (
        process_forward,
        process_step,
        process_step_after_a_forward,
        process_step_after_a_warmup,
    )
}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Before the tests above, which pass the time of their start."""
    with started(PROCESSES) as running:
        yield running


@pytest.mark.parametrize("name", PROCESSES)
def test_h57_first_use_inside_a_capture(
    processes: dict[str, subprocess.Popen[str]], name: str
) -> None:
    output = finish(processes[name])
    assert "worked" in output or "refused" in output
    print(output)
