"""Fixtures of all tests: the device, the skip of GPU tests, and NaN in every fresh result.

``Problem.allocate`` makes the result of every operator, so filling what it returns with NaN means that an
element which a kernel forgets to write cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import cake_ops
from cake_ops._problem import Problem
from cake_ops.cuda import launch
from cake_ops.cuda.router_config import LAYOUTS, RouterConfig
from cake_ops.cuda.routes import RouteCache

# Before their first import.
pytest.register_assert_rewrite("forms", "emulator", "gpu", "known_calls", "ranks")
from forms import Place
from known_calls import Watch, watcher

torch.set_num_threads(
    1
)  # the problems are small; on a busy machine two threads cost ten times the time


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test that takes it runs on the CPU, and on the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(
    params=[
        pytest.param(Place(torch.device("cpu"), torch.bfloat16), id="cpu-bf16"),
        pytest.param(Place(torch.device("cpu"), torch.float16), id="cpu-fp16"),
        pytest.param(Place(torch.device("cpu"), torch.float32), id="cpu-fp32"),
        pytest.param(Place(torch.device("cpu"), torch.float64), id="cpu-fp64"),
        pytest.param(
            Place(torch.device("cuda"), torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu
        ),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    """Each test that takes it runs on every device and dtype of the GEMMs."""
    return request.param


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """``(name, **options)`` returns a fast path of the operator and the list of its calls through the dispatcher."""
    return watcher(monkeypatch)


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each geometry that is planned."""
    planned: list[int] = []
    add = RouteCache.add

    def counting(self, key, *call):
        planned.append(1)
        return add(self, key, *call)

    monkeypatch.setattr(RouteCache, "add", counting)
    return planned


@pytest.fixture
def force() -> Iterator[Callable[[RouterConfig], str]]:
    """Makes every router call use one configuration, whatever would be chosen; returns the operator's name."""
    operator = {layout: name for name, layout in LAYOUTS.items()}

    def force(config: RouterConfig) -> str:
        name = operator[config.layout]
        cake_ops.set_router_route(name, config.name)
        return name

    yield force
    cake_ops.reset_router_routes()


@pytest.fixture
def unseen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a GPU where there is one, such as a snippet of the documentation, takes the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN (real tensors only; fakes have no data).

    The launches of the CUDA kernels allocate their results themselves, and copies of operands are made with
    ``new_empty``. A test that counts kernels or takes times does without: ``monkeypatch.undo()``.
    """
    allocate, new_empty = Problem.allocate, torch.Tensor.new_empty
    empty_strided = launch.empty_strided

    def poisoned(self, *tensors, out_dtype=None):
        out = allocate(self, *tensors, out_dtype=out_dtype)
        if type(out) is torch.Tensor and not out.is_meta:
            out.data.fill_(float("nan"))  # .data: the version of a result stays 0
        return out

    def poisoned_new_empty(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        if type(out) is torch.Tensor and out.is_cuda and out.is_floating_point():
            out.data.fill_(float("nan"))
        return out

    def poisoned_empty_strided(*call):
        out = empty_strided(*call)
        out.data.fill_(float("nan"))
        return out

    monkeypatch.setattr(Problem, "allocate", poisoned)
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)
        monkeypatch.setattr(launch, "empty_strided", poisoned_empty_strided)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
