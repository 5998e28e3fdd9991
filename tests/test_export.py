"""Tracing ahead of time: make_fx, torch.export, and AOTInductor packages in this and in fresh processes."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from families import FAMILIES, problem
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops.testing import count_launches


class Experts(nn.Module):
    """A router and two expert products: what a MoE block runs through this package."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = cake_ops.nn.RouterLinear(6, 3)
        self.up = cake_ops.nn.GroupedLinear(3, 6, 8, bias=True)
        self.down = cake_ops.nn.GroupedLinear(3, 8, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        offs = F.one_hot(chosen, 3).sum(0).cumsum(0, dtype=torch.int32)
        y = self.down(F.silu(self.up(x[order], offs)), offs)
        return torch.zeros_like(x).index_copy(0, order, y) * weight.unsqueeze(1)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    return Experts()


def targets(gm: torch.fx.GraphModule) -> list[str]:
    """The operators of the namespace in a graph, in order."""
    names = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    return [name.split(".")[1] for name in names if name.startswith("cake.")]


ROWS = (10, 33, 2)


def check_program(f: Callable[[Tensor], Tensor], model: nn.Module, rows: tuple[int, ...] = ROWS) -> None:
    for m in rows:
        x = torch.randn(m, 6)
        torch.testing.assert_close(f(x), model(x))


# make_fx


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_make_fx(name: str, mode: str, pre_dispatch: bool) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=False, b_grad=False)
    gm = make_fx(op, tracing_mode=mode, pre_dispatch=pre_dispatch)(a, b)
    assert targets(gm) == [name]
    assert torch.equal(gm(a + 1, b), op(a + 1, b))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_make_fx_through_a_backward(name: str, mode: str) -> None:
    op = problem(name)

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(op(a, b).pow(2).sum(), (a, b))

    a, b = op.operands()
    gm = make_fx(step, tracing_mode=mode)(a, b)
    assert targets(gm) == [name, f"{name}_dgrad", f"{name}_wgrad"]
    for actual, expected in zip(gm(a, b), step(a, b), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_make_fx_of_a_checkpointed_step_has_one_forward_product(name: str) -> None:
    op = problem(name)

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = checkpoint(lambda a, b: op(F.silu(a), b), a, b, use_reentrant=False)
        return torch.autograd.grad(y.sum(), (a, b))

    a, b = op.operands()
    gm = make_fx(step)(a, b)
    assert targets(gm) == [name, f"{name}_dgrad", f"{name}_wgrad"]
    for actual, expected in zip(gm(a, b), step(a, b), strict=True):
        assert torch.equal(actual, expected)


# torch.export


def export(model: nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    return torch.export.export(
        model, (torch.randn(10, 6),), dynamic_shapes=({0: Dim("rows", min=1)},), strict=strict
    )


@pytest.mark.parametrize("strict", [False, True])
def test_h49_export_with_dynamic_rows(model: nn.Module, strict: bool) -> None:
    program = export(model, strict)
    for p in (program, program.run_decompositions()):
        assert targets(p.graph_module) == ["router_mm", "grouped_mm", "grouped_mm"]
        check_program(p.module(), model)


def test_h49_export_static_and_save_and_load(model: nn.Module) -> None:
    x = torch.randn(10, 6)
    program = torch.export.export(model, (x,))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert targets(loaded.graph_module) == ["router_mm", "grouped_mm", "grouped_mm"]
    check_program(loaded.module(), model, rows=(10,))


def test_h49_exported_module_trains(model: nn.Module) -> None:
    exported = export(model).module()
    parameters = dict(exported.named_parameters())
    x = torch.randn(10, 6)
    exported(x).sum().backward()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(parameters[name].grad, p.grad)


def test_h49_export_of_all_families_and_writing_forms() -> None:
    class All(nn.Module):
        def forward(self, x: Tensor, w: Tensor, offs: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
            y = cake_ops.grouped_mm(x, w, offs)
            cake_ops.grouped_mm_wgrad_(buffer, y, x, offs)
            dense = cake_ops.dense_mm(x, w[0])
            batched = cake_ops.batched_mm(x.expand(3, -1, -1), w)
            split = cake_ops.split_bf16x3(cake_ops.router_mm(x, w[1]))
            return y, buffer + 1, dense, batched, split

    args = (torch.randn(10, 6), torch.randn(3, 5, 6), *problem("grouped_mm").offs)
    program = torch.export.export(All(), (*args, torch.zeros(3, 5, 6)))
    buffers = torch.ones(3, 5, 6), torch.ones(3, 5, 6)
    actual = program.module()(*args, buffers[0])
    expected = All()(*args, buffers[1])
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(*buffers)


# AOTInductor

FRESH = """
    import sys, torch
    if sys.argv[3] == "import":
        import cake_ops
    loaded = torch._inductor.aoti_load_package(sys.argv[1])
    x, y = torch.load(sys.argv[2])
    torch.testing.assert_close(loaded(x), y)
    print("equal")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("aoti") / "experts.pt2"
    model = Experts().requires_grad_(False)
    with torch._inductor.config.patch(compile_threads=1):
        torch._inductor.aoti_compile_and_package(export(model), package_path=str(path))
    return path, model


def run_fresh(path: Path, model: nn.Module, how: str) -> Any:
    x = torch.randn(12, 6)
    torch.save((x, model(x)), path.with_suffix(".pt"))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRESH), str(path), str(path.with_suffix(".pt")), how],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_h49_aoti_package_in_this_process(package: tuple[Path, nn.Module]) -> None:
    path, model = package
    loaded = torch._inductor.aoti_load_package(str(path))
    with count_launches() as launches:
        check_program(loaded, model, rows=(10,))
    assert launches["grouped_mm"] == 4 and launches["router_mm"] == 2  # the package and the model
    check_program(loaded, model)


@pytest.mark.slow
def test_h49_aoti_package_in_a_fresh_process(package: tuple[Path, nn.Module]) -> None:
    done = run_fresh(*package, "import")
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_h49_aoti_package_without_the_import_says_what_is_missing(
    package: tuple[Path, nn.Module],
) -> None:
    done = run_fresh(*package, "nothing")
    assert done.returncode != 0
    assert "cake::" in done.stderr
