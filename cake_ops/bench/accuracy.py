"""The accuracy of an arm's outputs, checked against FP64 before anything is timed.

A full FP64 product of 131072 x 6144 x 4096 for every arm would take longer than the benchmark. The
check instead multiplies each output by a few random vectors of +1 and -1 in FP64 and compares with
the same product of the exact result, which costs two thin products: Y V against X (W^T V). For such
vectors the mean of |(Y - R) v|^2 is exactly the squared Frobenius norm of Y - R (Hutchinson's
estimator; the idea of Freivalds' check), so every element of every output counts: a NaN or Inf
anywhere makes the error NaN, and a wrong row or tile shows in the row with the largest error.
Only block, which is not linear, has its inner activations computed in full in FP64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Case

__all__ = ["Data", "Reference", "relative_error", "tolerance"]

PROBES = 8
CHUNK_ROWS = 8192  # FP64 copies of that many rows at a time: 0.4 GB at 6144 columns


@dataclass
class Data:
    """The operands of one case. w_down is the second weight of a block, else None.

    x [M, K], w [E, N, K], g like the output, offs [E]; normal BF16 values, w scaled by K^-1/2 so
    that the outputs are of order one.
    """

    case: Case
    x: Tensor
    w: Tensor
    g: Tensor
    offs: Tensor
    w_down: Tensor | None = None

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int) -> Data:
        rng = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            t = torch.randn(*shape, generator=rng, device=device, dtype=torch.bfloat16)
            return t if scale == 1.0 else t.mul_(scale)

        block = case.family == "block"
        half = case.n // 2
        ends = torch.tensor(case.sizes).cumsum(0)
        return cls(
            case,
            x=normal(case.m, case.k),
            w=normal(case.experts, case.n, case.k, scale=case.k**-0.5),
            g=normal(case.m, case.k if block else case.n),
            offs=ends.to(torch.int32).to(device),
            w_down=normal(case.experts, case.k, half, scale=half**-0.5) if block else None,
        )


class Reference:
    """FP64 projections of the exact results of one case, computed when first asked for.

    Outputs are named y, dx, dw and, for a block, dw_down.
    """

    def __init__(self, data: Data, seed: int = 0) -> None:
        self._data = data
        self._rng = torch.Generator(data.x.device).manual_seed(seed)
        self._probes: dict[str, Tensor] = {}
        self._exact: dict[str, Tensor] = {}

    def errors(self, name: str, output: Tensor) -> tuple[float, float]:
        """Relative Frobenius error of an output, and the largest relative error of one row of it.

        A row of a dW is one (group, n). Rows are measured against the norm of the output's row, so
        a row that ought to be zero counts as 1 when it is not, and infinity the other way round.
        """
        output = output.detach()
        probes = self._probe(name, output.shape[-1])
        if name not in self._exact:
            if self._data.case.family == "block":
                self._compute_block(self._data)
            else:
                self._exact[name] = getattr(self, f"_compute_{name}")(self._data, probes)
        exact = self._exact[name]
        flat = output.reshape(-1, output.shape[-1])
        difference, norms = torch.empty_like(exact), exact.new_empty(len(flat))
        for rows in _chunks(0, len(flat)):
            wide = flat[rows].double()
            difference[rows] = wide @ probes - exact[rows]
            norms[rows] = wide.norm(dim=1)
        by_row = difference.square().mean(1).sqrt()
        worst = torch.where(by_row == 0, by_row, by_row / norms).max()
        return (difference.norm() / exact.norm()).item(), worst.item()

    def _probe(self, name: str, width: int) -> Tensor:
        if name not in self._probes:
            signs = torch.randint(
                0, 2, (width, PROBES), generator=self._rng, device=self._data.x.device
            )
            self._probes[name] = signs.double().mul_(2).sub_(1)
        return self._probes[name]

    @staticmethod
    def _compute_y(data: Data, probes: Tensor) -> Tensor:
        exact = probes.new_empty(len(data.x), PROBES)
        for e, group in enumerate(_groups(data)):
            projected = data.w[e].double().t() @ probes
            for rows in group:
                exact[rows] = data.x[rows].double() @ projected
        return exact

    @staticmethod
    def _compute_dx(data: Data, probes: Tensor) -> Tensor:
        exact = probes.new_empty(len(data.x), PROBES)
        for e, group in enumerate(_groups(data)):
            projected = data.w[e].double() @ probes
            for rows in group:
                exact[rows] = data.g[rows].double() @ projected
        return exact

    @staticmethod
    def _compute_dw(data: Data, probes: Tensor) -> Tensor:
        exact = probes.new_zeros(data.case.experts, data.case.n, PROBES)
        for e, group in enumerate(_groups(data)):
            for rows in group:
                exact[e] += data.g[rows].double().t() @ (data.x[rows].double() @ probes)
        return exact.flatten(0, 1)

    def _compute_block(self, data: Data) -> None:
        """All four outputs of silu(a) * b between gate_up and down, [a, b] = x w^T."""
        case, x, w, g, w_down = data.case, data.x, data.w, data.g, data.w_down
        assert w_down is not None
        v_y, v_dx = self._probe("y", case.k), self._probe("dx", case.k)
        v_dw, v_down = self._probe("dw", case.k), self._probe("dw_down", case.n // 2)
        y, dx = v_y.new_empty(case.m, PROBES), v_y.new_empty(case.m, PROBES)
        dw = v_y.new_zeros(case.experts, case.n, PROBES)
        dw_down = v_y.new_zeros(case.experts, case.k, PROBES)
        for e, group in enumerate(_groups(data)):
            up, down = w[e].double(), w_down[e].double()
            up_v, down_v = up @ v_dx, down.t() @ v_y
            for rows in group:
                x_rows, g_rows = x[rows].double(), g[rows].double()
                a, b = (x_rows @ up.t()).chunk(2, dim=1)
                sigmoid = torch.sigmoid(a)
                act = a * sigmoid * b
                y[rows] = act @ down_v
                d_act = g_rows @ down
                d_a = d_act * b * sigmoid * (1 + a * (1 - sigmoid))
                d_h = torch.cat([d_a, d_act * a * sigmoid], dim=1)
                dx[rows] = d_h @ up_v
                dw[e] += d_h.t() @ (x_rows @ v_dw)
                dw_down[e] += g_rows.t() @ (act @ v_down)
        self._exact = {"y": y, "dx": dx, "dw": dw.flatten(0, 1), "dw_down": dw_down.flatten(0, 1)}


def tolerance(op: str, dtype: torch.dtype) -> float:
    """Largest relative Frobenius error at which an arm is still timed.

    One rounding to BF16 costs 1.7e-3, and a block rounds four times on the way. FP32 outputs keep
    the truncation of the tensor cores' accumulators: 3e-6 at a contraction of 6144 on an H200, more
    over the longer one of dW.
    """
    if op.startswith("block"):
        return 1.5e-2
    return 1e-4 if dtype == torch.float32 else 4e-3


def relative_error(
    reference: Reference, op: str, outputs: dict[str, Tensor], *, rounded: bool = False
) -> float:
    """The largest relative Frobenius error among the outputs; RuntimeError past the tolerance.

    A single row may be ten times worse than the whole. rounded: the outputs went through BF16.
    """
    largest = 0.0
    for name, output in outputs.items():
        error, row_error = reference.errors(name, output)
        bound = tolerance(op, torch.bfloat16 if rounded else output.dtype)
        if not (error <= bound and row_error <= 10 * bound):  # NaN fails too
            raise RuntimeError(
                f"inaccurate {name}: relative error {error:.2e} (bound {bound:.0e}), "
                f"worst row {row_error:.2e}"
            )
        largest = max(largest, error)
    return largest


def _chunks(begin: int, end: int) -> Iterator[slice]:
    for start in range(begin, end, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, end))


def _groups(data: Data) -> Iterator[Iterator[slice]]:
    begin = 0
    for size in data.case.sizes:
        yield _chunks(begin, begin + size)
        begin += size
