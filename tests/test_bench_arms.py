"""The benchmark's arms and its accuracy check: every arm computes what it claims, every fault is found."""

from __future__ import annotations

import statistics
import sys
from types import SimpleNamespace

import pytest
import torch

from cake_ops.bench import arms, shapes
from cake_ops.bench.accuracy import Data, Reference, relative_error

CPU = torch.device("cpu")


CASE = shapes.Case("gate_up", (33, 0, 64, 7), 32, 48, "t")
BLOCK = shapes.Case("block", (33, 0, 64, 7), 32, 48, "t")


def exact(data: Data, op: str) -> dict[str, torch.Tensor]:
    """The outputs in FP64, group by group, gradients by torch's own autograd."""
    weights = [data.w] if data.w_down is None else [data.w, data.w_down]
    x, *ws = (t.double().requires_grad_() for t in (data.x, *weights))
    ys, begin = [], 0
    for e, size in enumerate(data.case.sizes):
        h = x[begin : begin + size] @ ws[0][e].t()
        if len(ws) == 2:
            a, b = h.chunk(2, -1)
            h = (torch.nn.functional.silu(a) * b) @ ws[1][e].t()
        ys.append(h)
        begin += size
    y = torch.cat(ys)
    grads = torch.autograd.grad(y, [x, *ws], data.g.double())
    return dict(zip(("y", "dx", "dw", "dw_down"), (y.detach(), *grads), strict=False))


@pytest.mark.parametrize("case", [CASE, BLOCK], ids=["gemm", "block"])
def test_the_reference_is_exact_and_the_estimate_unbiased(case):
    data = Data.random(case, CPU, seed=1)
    for name, value in exact(data, case.family).items():
        assert Reference(data).errors(name, value)[0] < 1e-12
        noisy = value + 1e-3 * value.norm() * torch.randn_like(value) / value.numel() ** 0.5
        true = ((noisy - value).norm() / value.norm()).item()
        found = statistics.fmean(Reference(data, seed).errors(name, noisy)[0] for seed in range(6))
        assert found == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("wrong", ["row", "nan", "element", "empty group"])
def test_a_wrong_output_is_found(wrong):
    data = Data.random(CASE, CPU, seed=2)
    outputs = {k: v.bfloat16() for k, v in exact(data, "ckpt").items()}
    reference = Reference(data)
    assert 5e-4 < relative_error(reference, "ckpt", outputs) < 4e-3
    if wrong == "row":
        outputs["y"][50] = outputs["y"][51]
    elif wrong == "nan":
        outputs["dx"][-1, -1] = float("nan")
    elif wrong == "element":
        outputs["dw"][3, 5, 7] += 10
    else:
        outputs["dw"][1, 0, 0] = 1e-6
    with pytest.raises(RuntimeError, match="inaccurate"):
        relative_error(reference, "ckpt", outputs)


def test_an_fp32_output_is_held_to_fp32_unless_it_was_rounded():
    data = Data.random(CASE, CPU, seed=3)
    outputs = {"dw": exact(data, "dW fp32")["dw"].bfloat16().float()}
    with pytest.raises(RuntimeError, match="inaccurate dw"):
        relative_error(Reference(data), "dW fp32", outputs)
    assert relative_error(Reference(data), "dW fp32", outputs, rounded=True) > 5e-4


@pytest.mark.parametrize("op", list(shapes.OPS))
@pytest.mark.parametrize("arm", ["cake", "control", "inforward", "torch", "cublas"])
def test_every_arm_is_accurate_in_every_operation(arm, op):
    data = Data.random(BLOCK if op.startswith("block") else CASE, CPU, seed=4)
    outputs = arms.build(arm, op, data)()
    names = {"fwd": "y", "dgrad": "dx", "dW": "dw", "dW fp32": "dw"}.get(op)
    expected = [names] if names else ["y", "dx", "dw"] + ["dw_down"] * op.startswith("block")
    assert list(outputs) == expected
    dtype = torch.float32 if op == "dW fp32" else torch.bfloat16
    assert all(t.dtype == dtype for t in outputs.values())
    relative_error(Reference(data), op, outputs, rounded=arms.rounded(arm, op))


def test_which_arms_belong_in_a_row():
    cuda = torch.device("cuda")
    aligned = shapes.Case("gate_up", (128, 256), 32, 48, "t")
    assert [a for a in arms.ARMS if arms.eligible(a, CASE, "fwd", cuda)] == [
        "cake",
        "control",
        "torch",
        "cublas",
    ]
    assert "inforward" in [a for a in arms.ARMS if arms.eligible(a, CASE, "ckpt ES", cuda)]
    assert arms.eligible("deepgemm", aligned, "fwd", cuda)
    assert not arms.eligible("deepgemm", aligned, "dW", cuda)
    assert not arms.eligible("deepgemm", aligned, "fwd", CPU)


def test_deepgemm_gets_its_own_layout_and_says_why_it_is_missing(monkeypatch):
    aligned = shapes.Case("gate_up", (128, 256), 32, 48, "t")
    data = Data.random(aligned, CPU, seed=5)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(arms.Unavailable, match="cannot be imported"):
        arms.build("deepgemm", "fwd", data)

    def groups(index):
        return [(e, torch.nonzero(index == e)[:, 0]) for e in range(2)]

    def nt(x, w, y, index):
        for e, rows in groups(index):
            y[rows] = x[rows] @ w[e].t()

    def nn(g, w, dx, index):
        for e, rows in groups(index):
            dx[rows] = g[rows] @ w[e]

    def tn(g, x, dw, sizes, sizes_device, c):
        assert sizes == sizes_device.tolist() == [128, 256] and c is dw
        for e, rows in enumerate((slice(0, 128), slice(128, 384))):
            dw[e] += g[rows].float().t() @ x[rows].float()

    fake = SimpleNamespace(
        m_grouped_bf16_gemm_nt_contiguous=nt,
        m_grouped_bf16_gemm_nn_contiguous=nn,
        k_grouped_bf16_gemm_tn_contiguous=tn,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    for op in ("fwd", "dgrad", "dW fp32"):
        relative_error(Reference(data), op, arms.build("deepgemm", op, data)())
