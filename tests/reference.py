"""FP64 references and input makers shared by the tests: plain loops, no code of the package."""

from __future__ import annotations

import torch
from torch import Tensor


def ranges(offs: Tensor) -> list[tuple[int, int]]:
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def offsets(sizes: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Group sizes -> int32 cumulative ends."""
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(device, torch.int32)


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64, device=x.device)
    for e, (start, end) in enumerate(ranges(offs)):
        y[start:end] = x[start:end].double() @ w[e].double().t()
    return y


def grouped_mm_dgrad(g: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return grouped_mm(g, w.transpose(1, 2), offs)


def grouped_mm_wgrad(g: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    dw = torch.zeros(offs.shape[0], g.shape[1], x.shape[1], dtype=torch.float64, device=g.device)
    for e, (start, end) in enumerate(ranges(offs)):
        dw[e] = g[start:end].double().t() @ x[start:end].double()
    return dw


def mm(a: Tensor, w: Tensor) -> Tensor:
    """a w^T of matrices or of batches; ``a`` may have any leading dimensions over a matrix w."""
    return a.double() @ w.double().mT


def mm_dgrad(g: Tensor, w: Tensor) -> Tensor:
    return g.double() @ w.double()


def mm_wgrad(g: Tensor, x: Tensor) -> Tensor:
    """g^T x over all leading dimensions."""
    rows = g.shape[:-1].numel()
    return g.double().reshape(rows, g.shape[-1]).t() @ x.double().reshape(rows, x.shape[-1])


def batched_mm_wgrad(g: Tensor, x: Tensor) -> Tensor:
    return g.double().mT @ x.double()


PRODUCTS = {
    "grouped_mm": grouped_mm,
    "grouped_mm_dgrad": grouped_mm_dgrad,
    "grouped_mm_wgrad": grouped_mm_wgrad,
    "router_mm": mm,
    "router_mm_dgrad": mm_dgrad,
    "router_mm_wgrad": mm_wgrad,
    "dense_mm": mm,
    "dense_mm_dgrad": mm_dgrad,
    "dense_mm_wgrad": mm_wgrad,
    "batched_mm": mm,
    "batched_mm_dgrad": mm_dgrad,
    "batched_mm_wgrad": batched_mm_wgrad,
}
"""The reference of every product of the package."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius error relative to the reference; NaN anywhere gives NaN, which fails any bound."""
    difference = (actual.double() - expected.double()).norm()
    norm = expected.double().norm()
    return (difference / norm if norm > 0 else difference).item()


def peak_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of an element relative to the largest element: one wrong element cannot hide."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    peak = expected.double().abs().max()
    return (difference / peak if peak > 0 else difference).item()


def tolerance(dtype: torch.dtype) -> float:
    """Bound on both errors after FP32 sums and one rounding to ``dtype``: half an ulp of BF16 (2^-8) or
    FP16 (2^-11) and a little for the sums. Several roundings in a row need as many times that."""
    return {
        torch.bfloat16: 4e-3,
        torch.float16: 5e-4,
        torch.float32: 2e-6,
        torch.float64: 1e-14,
    }[dtype]
