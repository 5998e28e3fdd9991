"""The steps of experts between their GEMMs: formulas by gradcheck, Triton kernels against FP64.

Without a GPU the kernels run in Triton's interpreter, which is chosen before Triton is imported: hence a
process of its own, which runs this file.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

from cake_ops.integrations import expert_rows
from cake_ops.integrations.expert_rows import combine, dispatch, gated_silu

ROUNDED = 2**-8  # the largest relative error of one rounding to BF16


def routing(tokens: int, top_k: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Token of each row and row of each choice, in an order drawn at random."""
    order = torch.randperm(tokens * top_k, device=device)
    return order // top_k, order.argsort()


def operands(r: int, i: int, weight: torch.dtype, dtype=torch.bfloat16, device="cpu"):
    shapes = ((r, 2 * i), (r, 1), (r, i))
    y, factor, g = (torch.randn(shape, device=device) for shape in shapes)
    return y.to(dtype), factor.to(weight), g.to(dtype)


def exact(y: Tensor, weight: Tensor, g: Tensor) -> list[Tensor]:
    """The result of gated_silu and its two gradients in FP64, by the operators of PyTorch."""
    y, weight = (t.detach().double().requires_grad_() for t in (y, weight))
    gate, up = y.chunk(2, -1)
    out = torch.nn.functional.silu(gate) * up * weight
    return [out.detach(), *torch.autograd.grad(out, (y, weight), g.double())]


def assert_near(got: tuple[Tensor, ...], want: list[Tensor], bf16_bound: float) -> None:
    for a, b in zip(got, want, strict=True):
        bound = bf16_bound if a.dtype == torch.bfloat16 else 5e-6
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= bound * b.norm(), (a.dtype, a.shape)


# Formulas


def test_gradients_of_first_and_second_order() -> None:
    y, weight, _ = operands(7, 5, torch.float64, torch.float64)
    assert gradcheck(gated_silu, (y.requires_grad_(), weight.requires_grad_()))
    assert gradgradcheck(gated_silu, (y, weight))
    source, inverse = routing(5, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(15, 4, dtype=torch.float64, requires_grad=True)
    for f, t in ((dispatch, x), (combine, rows)):
        assert gradcheck(lambda t, f=f: f(t, source, inverse, 3, torch.float64), t)
        assert gradgradcheck(lambda t, f=f: f(t, source, inverse, 3, torch.float64), t)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_formula_rounds_once(weight: torch.dtype) -> None:
    y, factor, g = operands(63, 100, weight)
    leaves = [y.requires_grad_(), factor.requires_grad_()]
    out = gated_silu(*leaves)
    got = (out.detach(), *torch.autograd.grad(out, leaves, g))
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, weight]
    assert_near(got, exact(y, factor, g), ROUNDED)


def test_combine_undoes_dispatch() -> None:
    source, inverse = routing(31, 4)
    x = torch.randn(31, 8)
    rows = dispatch(x, source, inverse, 4, torch.float32)
    assert torch.equal(rows, x[source])
    assert torch.equal(combine(rows, source, inverse, 4, torch.float32), 4 * x)


def test_what_lies_between_is_not_saved() -> None:
    y, weight, _ = operands(7, 5, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_silu(y.requires_grad_(), weight.requires_grad_())
    assert {t.data_ptr() for t in saved} == {y.data_ptr(), weight.data_ptr()}


# Kernels


def check_kernels(device: str, bf16_bound: float) -> None:
    from cake_ops.integrations import _triton_rows as kernels

    for r, i in ((0, 8), (1, 1), (7, 23), (33, 1024), (5, 1500)):
        for weight in (torch.float32, torch.bfloat16):
            y, factor, g = operands(r, i, weight, device=device)
            want = exact(y, factor, g)
            assert_near((kernels.gated_silu(y, factor),), want[:1], bf16_bound)
            dy, dfactor = kernels.gated_silu_backward(g, y, factor)
            assert (dy.dtype, dfactor.dtype) == (y.dtype, weight)
            assert_near((dy, dfactor), want[1:], bf16_bound)
    strided = torch.randn(9, 40, device=device, dtype=torch.bfloat16)[:, 3:17]
    one = torch.ones(1, 1, device=device).expand(9, 1)
    assert torch.equal(kernels.gated_silu(strided, one), kernels.gated_silu(strided.clone(), one))
    for tokens, top_k, columns in ((0, 2, 8), (5, 1, 1), (9, 3, 100), (4, 8, 1030)):
        _, inverse = routing(tokens, top_k, device)
        rows = torch.randn(tokens * top_k, columns, device=device, dtype=torch.bfloat16)
        want = rows.double()[inverse].view(tokens, top_k, columns).sum(1)
        for dtype in (torch.bfloat16, torch.float32):
            assert_near((kernels.sum_rows(rows, inverse, top_k, dtype),), [want], bf16_bound)


@pytest.mark.client
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("test_kernels_on_the_gpu runs the kernels themselves")
    run = subprocess.run(
        [sys.executable, __file__],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    check_kernels("cuda", ROUNDED)


@pytest.mark.gpu
def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels where nothing records, formulas elsewhere; both give the same."""
    y, weight, g = operands(63, 100, torch.float32, device="cuda")
    leaves, want = [y.requires_grad_(), weight.requires_grad_()], exact(y, weight, g)
    used: list[bool] = []
    choose = expert_rows._kernels

    def spy(*tensors: Tensor):
        kernels = choose(*tensors)
        used.append(kernels is not None)
        return kernels

    monkeypatch.setattr(expert_rows, "_kernels", spy)

    def save_all(*_, **__) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def selected(*leaves: Tensor) -> Tensor:
        options = {"use_reentrant": False, "context_fn": lambda: selective(save_all)}
        return checkpoint(gated_silu, *leaves, **options)

    for function, create_graph, expected in (
        (gated_silu, False, [True, True]),
        (gated_silu, True, [True, False]),
        (selected, False, [False, True]),
    ):
        used.clear()
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, g, create_graph=create_graph)
        assert_near((out.detach(), *(t.detach() for t in grads)), want, ROUNDED)
        assert used[:1] + used[-1:] == expected


if __name__ == "__main__":
    torch.manual_seed(0)
    check_kernels("cpu", 4 * ROUNDED)  # the interpreter truncates
