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
    dw = torch.zeros(
        offs.shape[0], g.shape[1], x.shape[1], dtype=torch.float64, device=g.device
    )
    for e, (start, end) in enumerate(ranges(offs)):
        dw[e] = g[start:end].double().t() @ x[start:end].double()
    return dw


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius error relative to the reference; NaN anywhere gives NaN, which fails any bound."""
    difference = (actual.double() - expected.double()).norm()
    norm = expected.double().norm()
    return (difference / norm if norm > 0 else difference).item()


def tolerance(dtype: torch.dtype) -> float:
    """Bound on the relative Frobenius error of one rounding to ``dtype`` after FP32 sums."""
    return {
        torch.bfloat16: 4e-3,
        torch.float16: 5e-4,
        torch.float32: 2e-6,
        torch.float64: 1e-14,
    }[dtype]
