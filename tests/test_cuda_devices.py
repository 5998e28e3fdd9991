"""Two GPUs in one process and in two: the operands decide where a call runs, whatever device is current."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forms import same_bits
from gpu import KERNEL_FAMILIES, Problem, small
from ranks import recipe, torchrun

import cake_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

each_family = pytest.mark.parametrize("family", KERNEL_FAMILIES)
each_way = pytest.mark.parametrize("current, used", [(0, 1), (1, 0)])


def check_step(p: Problem, results: tuple[torch.Tensor, ...]) -> None:
    with torch.cuda.device(p.x.device):
        p.check_step(results)


@each_way
@each_family
def test_h58_operands_decide_the_device(family: str, current: int, used: int) -> None:
    with torch.cuda.device(current):
        p = small(family, device=f"cuda:{used}")
        for name in p.products:
            y = p.run(name)
            assert y.device == p.x.device and torch.cuda.current_device() == current
            with torch.cuda.device(used):
                p.check(name, y)
        results = p.step()
        assert torch.cuda.current_device() == current
        assert all(result.device == p.x.device for result in results)
        check_step(p, results)
        with pytest.raises(RuntimeError, match="all tensors must be on one device"):
            p.forward(p.x, p.w.to(f"cuda:{current}"))


@each_family
def test_h58_one_geometry_on_both_devices(family: str) -> None:
    """Addresses of the two may be the same; routes and tensor maps are each device's own."""
    problems = [small(family, device=f"cuda:{i}") for i in (0, 1)]
    cake_ops.clear_caches()
    for i in (0, 1, 0, 1, 1, 0):
        check_step(problems[i], problems[i].step())


@each_family
def test_h58_a_thread_for_each_device(family: str) -> None:
    """First uses and repeats at the same time; the threads have no context of their own at first."""
    cake_ops.clear_caches()
    begin = threading.Barrier(2)

    def work(device: int) -> list[tuple[torch.Tensor, ...]]:
        begin.wait()
        return [problems[device].step() for _ in range(30)]

    problems = [small(family, device=f"cuda:{i}") for i in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        for device, steps in enumerate(threads.map(work, (0, 1))):
            check_step(problems[device], steps[0])
            for step in steps[1:]:
                assert all(map(same_bits, step, steps[0]))


@each_way
@each_family
def test_h58_graphs_and_prepared_launches_stay_on_their_device(
    family: str, current: int, used: int
) -> None:
    p = small(family, device=f"cuda:{used}")
    forward = p.products[0]
    prepared = cake_ops.prepare(forward, *p.tensors(forward))
    with torch.cuda.device(used):
        p.step()
        graph = torch.cuda.CUDAGraph()
        # The stream that torch captures on by default is of the device that captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            results = p.step()
    with torch.cuda.device(current):
        for _ in range(2):
            for t in (p.x, p.w, p.g):
                t.normal_()
            torch.cuda.synchronize(used)
            graph.replay()
            prepared.launch()
            torch.cuda.synchronize(used)
            assert torch.cuda.current_device() == current
            check_step(p, results)
            with torch.cuda.device(used):
                p.check(forward, prepared.out)


def test_the_distributed_recipe_in_the_docs_trains(tmp_path: Path) -> None:
    """Experts on two GPUs, FSDP2 around them, NCCL between them."""
    (tmp_path / "train.py").write_text(recipe())
    torchrun(2, str(tmp_path / "train.py"))
