"""Tracing ahead of time: make_fx, AOTAutograd's graphs, torch.export, and AOTInductor packages."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import expecttest
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from families import FAMILIES, problem
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_func
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
        self.up = cake_ops.nn.GroupedLinear(3, 6, 8)
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


def check_program(
    f: Callable[[Tensor], Tensor], model: nn.Module, rows: tuple[int, ...] = ROWS
) -> None:
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
    gm = make_fx(op.overload, tracing_mode=mode, pre_dispatch=pre_dispatch)(a, b, *op.offs)
    assert targets(gm) == [name]
    assert torch.equal(gm(a + 1, b, *op.offs), op(a + 1, b))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_make_fx_through_a_backward(name: str, mode: str) -> None:
    op = problem(name)

    def step(a: Tensor, b: Tensor, *offs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(op.overload(a, b, *offs).pow(2).sum(), (a, b))

    args = (*op.operands(), *op.offs)
    gm = make_fx(step, tracing_mode=mode)(*args)
    assert targets(gm) == [name, f"{name}_dgrad", f"{name}_wgrad"]
    assert all(map(torch.equal, gm(*args), step(*args)))


@pytest.mark.parametrize("name", FAMILIES)
def test_make_fx_of_a_checkpointed_step_has_one_forward_product(name: str) -> None:
    op = problem(name)

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = checkpoint(lambda a, b: op(F.silu(a), b), a, b, use_reentrant=False)
        return torch.autograd.grad(y.sum(), (a, b))

    a, b = op.operands()
    gm = make_fx(step)(a, b)
    assert targets(gm) == [name, f"{name}_dgrad", f"{name}_wgrad"]
    assert all(map(torch.equal, gm(a, b), step(a, b)))


# Traced graphs


def traced(f: Callable[..., Tensor], *args: Tensor) -> str:
    graphs = []

    def record(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.code.strip())
        return make_boxed_func(gm)

    aot_function(f, fw_compiler=record, bw_compiler=record)(*args).sum().backward()
    return "\n\n".join(graphs)


def test_traced_grouped_mm() -> None:
    op = problem("grouped_mm")
    f = partial(cake_ops.grouped_mm, deterministic=False)
    expecttest.assert_expected_inline(
        traced(f, *op.operands(), *op.offs),
        """\
def forward(self, primals_1, primals_2, primals_3):
    grouped_mm = torch.ops.cake.grouped_mm.default(primals_1, primals_2, primals_3, deterministic = False)
    return (grouped_mm, primals_1, primals_2, primals_3)

def forward(self, primals_1, primals_2, primals_3, tangents_1):
    grouped_mm_dgrad = torch.ops.cake.grouped_mm_dgrad.default(tangents_1, primals_2, primals_3);  primals_2 = None
    grouped_mm_wgrad = torch.ops.cake.grouped_mm_wgrad.default(tangents_1, primals_1, primals_3, deterministic = False);  tangents_1 = primals_1 = primals_3 = None
    return (grouped_mm_dgrad, grouped_mm_wgrad, None)""",
    )


def test_traced_router_mm() -> None:
    op = problem("router_mm")
    a, b = op.operands()
    b = b.detach().bfloat16().requires_grad_()
    expecttest.assert_expected_inline(
        traced(cake_ops.router_mm, a, b),
        """\
def forward(self, primals_1, primals_2):
    router_mm = torch.ops.cake.router_mm.default(primals_1, primals_2)
    return (router_mm, primals_1, primals_2)

def forward(self, primals_1, primals_2, tangents_1):
    router_mm_dgrad = torch.ops.cake.router_mm_dgrad.default(tangents_1, primals_2);  primals_2 = None
    router_mm_wgrad = torch.ops.cake.router_mm_wgrad.default(tangents_1, primals_1, out_dtype = torch.bfloat16);  tangents_1 = primals_1 = None
    return (router_mm_dgrad, router_mm_wgrad)""",
    )


def test_traced_dense_mm_with_float32_result() -> None:
    op = problem("dense_mm")
    f = partial(cake_ops.dense_mm, out_dtype=torch.float32)
    expecttest.assert_expected_inline(
        traced(f, *op.operands(torch.bfloat16)),
        """\
def forward(self, primals_1, primals_2):
    dense_mm = torch.ops.cake.dense_mm.default(primals_1, primals_2, out_dtype = torch.float32)
    return (dense_mm, primals_1, primals_2)

def forward(self, primals_1, primals_2, tangents_1):
    _to_copy = torch.ops.aten._to_copy.default(tangents_1, dtype = torch.bfloat16);  tangents_1 = None
    dense_mm_dgrad = torch.ops.cake.dense_mm_dgrad.default(_to_copy, primals_2);  primals_2 = None
    dense_mm_wgrad = torch.ops.cake.dense_mm_wgrad.default(_to_copy, primals_1);  _to_copy = primals_1 = None
    return (dense_mm_dgrad, dense_mm_wgrad)""",
    )


def test_traced_batched_mm_with_transposed_weight() -> None:
    op = problem("batched_mm")
    a, b = op.operands()
    b = b.detach().mT.contiguous().mT.requires_grad_()
    expecttest.assert_expected_inline(
        traced(cake_ops.batched_mm, a, b),
        """\
def forward(self, primals_1, primals_2):
    batched_mm = torch.ops.cake.batched_mm.default(primals_1, primals_2)
    return (batched_mm, primals_1, primals_2)

def forward(self, primals_1, primals_2, tangents_1):
    batched_mm_dgrad = torch.ops.cake.batched_mm_dgrad.default(tangents_1, primals_2);  primals_2 = None
    batched_mm_wgrad = torch.ops.cake.batched_mm_wgrad.default(primals_1, tangents_1);  primals_1 = tangents_1 = None
    transpose = torch.ops.aten.transpose.int(batched_mm_wgrad, -2, -1);  batched_mm_wgrad = None
    return (batched_mm_dgrad, transpose)""",
    )


def test_traced_accumulation() -> None:
    graphs = []

    def record(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.code.strip())
        return make_boxed_func(gm)

    def f(out: Tensor, g: Tensor, x: Tensor, offs: Tensor) -> Tensor:
        cake_ops.grouped_mm_wgrad_(out, g, x, offs)
        return 2 * out

    op = problem("grouped_mm_wgrad")
    args = (
        torch.zeros(op.result, dtype=op.dtype),
        *op.operands(a_grad=False, b_grad=False),
        *op.offs,
    )
    torch.compile(f, backend=aot_autograd(fw_compiler=record), fullgraph=True)(*args)
    expecttest.assert_expected_inline(
        graphs[0],
        """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1):
    auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.cake.grouped_mm_wgrad_.default, g = arg1_1, x = arg2_1, offs = arg3_1, deterministic = True, _out_base_index = 0, _all_bases = [arg0_1]);  arg1_1 = arg2_1 = arg3_1 = arg0_1 = None
    getitem_1 = auto_functionalized_v2[1];  auto_functionalized_v2 = None
    mul = torch.ops.aten.mul.Tensor(getitem_1, 2)
    return (getitem_1, mul)""",
    )


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
    assert torch.equal(*buffers) and (buffers[0] != 1).any()


# AOTInductor

FRESH = """
    import sys, torch
    if sys.argv[1] == "import":
        import cake_ops
    x, y = torch.load("tensors.pt")
    try:
        torch.testing.assert_close(torch.export.load("program.pt2").module()(x), y)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    torch.testing.assert_close(torch._inductor.aoti_load_package("package.pt2")(x), y)
    print("equal")
"""


class Package(NamedTuple):
    """A folder with an exported program, an AOTInductor package of it, an input and its result."""

    folder: Path
    model: nn.Module

    def load_in_fresh_process(self, how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(FRESH), how],
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("aoti")
    model = Experts().requires_grad_(False)
    program = export(model)
    torch.export.save(program, folder / "program.pt2")
    with torch._inductor.config.patch(compile_threads=1):
        path = str(folder / "package.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    x = torch.randn(12, 6)
    torch.save((x, model(x)), folder / "tensors.pt")
    return Package(folder, model)


@pytest.mark.slow
def test_h49_aoti_package_in_this_process(package: Package) -> None:
    loaded = torch._inductor.aoti_load_package(str(package.folder / "package.pt2"))
    with count_launches() as launches:
        check_program(loaded, package.model, rows=(10,))
    assert launches["grouped_mm"] == 4 and launches["router_mm"] == 2  # the package and the model
    check_program(loaded, package.model)


@pytest.mark.slow
def test_h49_aoti_package_in_a_fresh_process(package: Package) -> None:
    done = package.load_in_fresh_process("import")
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_h49_without_the_import_torch_says_what_is_missing(package: Package) -> None:
    """The messages are torch's own: neither file holds the name of a Python package to import."""
    done = package.load_in_fresh_process("nothing")
    assert done.returncode != 0 and done.stdout == ""
    assert "import the custom op" in done.stderr  # torch.export.load
    assert "Could not find schema for cake::" in done.stderr  # aoti_load_package
