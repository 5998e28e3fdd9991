"""The rows of the router benchmark, their operands, and the FP64 check of every output.

A router is small, so its exact results are computed in full: every element of an output is compared. For
the logits the experts count as well. A token agrees when its eight largest logits are those of FP64,
whatever their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .shapes import MODES, Row

__all__ = [
    "OPS",
    "PASSES",
    "RouterCase",
    "RouterData",
    "all_rows",
    "flops",
    "measure_outputs",
    "quick_rows",
    "rows_of",
    "smoke_rows",
    "top_experts",
]

EXPERTS = 256
TOP = 8

# op -> the passes of one call. 2fwd+bwd is a checkpointed step: the forward runs again for backward.
OPS: dict[str, tuple[str, ...]] = {
    "fwd": ("fwd",),
    "dgrad": ("dgrad",),
    "wgrad": ("wgrad",),
    "bwd": ("dgrad", "wgrad"),
    "2fwd+bwd": ("fwd", "fwd", "dgrad", "wgrad"),
}
PASSES = ("fwd", "dgrad", "wgrad")


@dataclass(frozen=True)
class RouterCase:
    """One router: T tokens of width H, N experts."""

    hidden: int
    tokens: int
    experts: int = EXPERTS

    @property
    def name(self) -> str:
        return f"H{self.hidden} T{self.tokens}"


@dataclass
class RouterData:
    """The operands of one case, all FP32: x [T, H], w [N, H], g [T, N].

    w is scaled by H^-1/2, so that the logits are of order one.
    """

    case: RouterCase
    x: Tensor
    w: Tensor
    g: Tensor

    @classmethod
    def random(cls, case: RouterCase, device: torch.device, seed: int) -> RouterData:
        rng = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=device)

        return cls(
            case,
            x=normal(case.tokens, case.hidden),
            w=normal(case.experts, case.hidden).mul_(case.hidden**-0.5),
            g=normal(case.tokens, case.experts),
        )

    def operands(self, name: str) -> tuple[Tensor, Tensor]:
        """The two matrices whose product a pass is; views of the operands."""
        return {
            "fwd": (self.x, self.w.t()),
            "dgrad": (self.g, self.w),
            "wgrad": (self.g.t(), self.x),
        }[name]

    def exact_logits(self) -> Tensor:
        return torch.mm(self.x.double(), self.w.double().t())

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """y, dx and dw in FP64."""
        return {
            output: torch.mm(*(t.double() for t in self.operands(name)))
            for output, name in zip(("y", "dx", "dw"), PASSES, strict=True)
        }


def rows_of(cases: Iterable[RouterCase], modes: Iterable[str] = MODES) -> list[Row]:
    modes = tuple(modes)
    return [Row(case, op, mode) for case in cases for op in OPS for mode in modes]


def all_rows() -> list[Row]:
    return rows_of(RouterCase(h, t) for h in (4096, 5120, 6144) for t in (64, 256, 1024))


def quick_rows() -> list[Row]:
    return rows_of(RouterCase(6144, t) for t in (64, 256, 1024))


def smoke_rows() -> list[Row]:
    """Tiny problems that walk every path of the harness on a CPU; their times mean nothing."""
    return rows_of((RouterCase(64, 7, 16), RouterCase(100, 33, 24)), ("eager",))


def flops(case: RouterCase, op: str) -> float:
    """Of the FP32 products themselves, the same for every arm, however it computes them."""
    return len(OPS[op]) * 2.0 * case.tokens * case.hidden * case.experts


def top_experts(logits: Tensor) -> Tensor:
    """The experts of the eight largest logits of each token, in ascending order of index."""
    return logits.topk(TOP, dim=1).indices.sort(dim=1).values


def measure_outputs(
    data: RouterData, outputs: Mapping[str, Tensor], bound: float
) -> tuple[float, dict[str, float]]:
    """The largest relative Frobenius error, and what else is known of the outputs' accuracy.

    An output is named y, dx or dw; "y again" is a second y. max_error is the largest error of one
    element over the largest element of the exact result; top8 is the share of tokens whose experts are
    those of FP64. RuntimeError when an output is past the bound, or one of its rows past ten times it.
    """
    largest, found = 0.0, {"max_error": 0.0}
    for name, output in outputs.items():
        exact = data.exact[name.split()[0]]
        if output.shape != exact.shape:
            raise RuntimeError(f"{name} has shape {tuple(output.shape)}, not {tuple(exact.shape)}")
        difference = output.double() - exact
        error = (difference.norm() / exact.norm()).item()
        row_error = (difference.norm(dim=1) / exact.norm(dim=1)).max().item()
        if not (error <= bound and row_error <= 10 * bound):  # NaN fails too
            raise RuntimeError(
                f"inaccurate {name}: relative error {error:.2e} (bound {bound:.0e}), "
                f"worst row {row_error:.2e}"
            )
        largest = max(largest, error)
        element = (difference.abs().max() / exact.abs().max()).item()
        found["max_error"] = max(found["max_error"], element)
        if name.startswith("y"):
            same = (top_experts(output) == top_experts(exact)).all(dim=1)
            found["top8"] = min(found.get("top8", 1.0), same.double().mean().item())
    return largest, found
