"""The rows of the benchmark: which problems, which operations, how much arithmetic.

A case is a list of group sizes with N and K; a row is a case, an operation and a mode. Everything
here is plain arithmetic on host integers, so it runs and is tested without a GPU.

Names: gate_up and down are the two expert projections of one MoE layer (model width 6144, expert
width 2048, gate and up fused, so N = 4096); block is both with silu(a) * b between them; small
stands for the few-rows-a-group problems of fine-grained experts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "MODES",
    "OPS",
    "Case",
    "Row",
    "balanced",
    "estimate_seconds",
    "flops",
    "large_cases",
    "lognormal",
    "one_empty",
    "quick_rows",
    "rows_of",
    "select",
    "skewed",
    "small_cases",
    "smoke_cases",
]

MODES = ("eager", "graph")

# op -> (families it is run on, GEMMs of one call). ckpt is forward, recomputed forward, dgrad and
# dW; with early stop (ES) the recomputed forward is not needed, so it is not counted as work. In a
# block only the recomputation of the last GEMM can be skipped; `flops` weighs its two GEMMs.
OPS: dict[str, tuple[tuple[str, ...], int]] = {
    "fwd": (("gate_up", "down", "small"), 1),
    "dgrad": (("gate_up", "down", "small"), 1),
    "dW": (("gate_up", "down", "small"), 1),
    "dW fp32": (("gate_up", "down"), 1),
    "ckpt": (("gate_up", "down"), 4),
    "ckpt ES": (("gate_up", "down"), 3),
    "block": (("block",), 4),
    "block ES": (("block",), 3),
}

GATE_UP = (4096, 6144)
DOWN = (6144, 2048)


@dataclass(frozen=True)
class Case:
    """One problem: the group sizes and the weight's shape [E, N, K].

    In a block, n and k are gate_up's; down's weight is then [E, k, n // 2].
    """

    family: str
    sizes: tuple[int, ...]
    n: int
    k: int
    label: str

    @property
    def experts(self) -> int:
        return len(self.sizes)

    @property
    def m(self) -> int:
        return sum(self.sizes)

    @property
    def name(self) -> str:
        return f"{self.family} {self.label}"


@dataclass(frozen=True)
class Row:
    case: Case
    op: str
    mode: str

    @property
    def name(self) -> str:
        """What ``--rows`` matches, for example "gate_up E8 M131072 balanced, dgrad, graph"."""
        return f"{self.case.name}, {self.op}, {self.mode}"


def apportion(weights: Iterable[float], total: int) -> tuple[int, ...]:
    """Integers proportional to the weights that add up to total (largest remainders)."""
    weights = list(weights)
    scale = total / sum(weights)
    sizes = [int(weight * scale) for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda i: weights[i] * scale - sizes[i], reverse=True
    )
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def balanced(experts: int, m: int) -> tuple[int, ...]:
    return apportion([1.0] * experts, m)


def skewed(m: int) -> tuple[int, ...]:
    """Four groups of 1/2, 1/4, 1/8 and 1/8 of the rows."""
    return apportion((4, 2, 1, 1), m)


def one_empty(m: int, *, ascending: bool) -> tuple[int, ...]:
    """Four groups in the proportion 0 : 1 : 2 : 3, or the reverse."""
    return apportion((0, 1, 2, 3) if ascending else (3, 2, 1, 0), m)


def lognormal(experts: int, m: int, *, cv: float = 0.35, seed: int = 0) -> tuple[int, ...]:
    """Log-normally distributed sizes with the coefficient of variation cv, the same every time."""
    sigma = math.sqrt(math.log1p(cv * cv))
    rng = random.Random(seed)
    return apportion([math.exp(sigma * rng.gauss(0.0, 1.0)) for _ in range(experts)], m)


def large_cases() -> list[Case]:
    """The training-size problems: 14 distributions of rows for gate_up, down and block."""
    groupings: list[tuple[str, tuple[int, ...]]] = []
    for m in (112576, 136064):
        groupings += [
            (f"E4 M{m} balanced", balanced(4, m)),
            (f"E4 M{m} skewed", skewed(m)),
            (f"E4 M{m} one empty descending", one_empty(m, ascending=False)),
            (f"E4 M{m} one empty ascending", one_empty(m, ascending=True)),
        ]
    for experts in (8, 16, 32):
        m = 131072
        groupings += [
            (f"E{experts} M{m} balanced", balanced(experts, m)),
            (f"E{experts} M{m} lognormal", lognormal(experts, m)),
        ]
    weights = (("gate_up", GATE_UP), ("down", DOWN), ("block", GATE_UP))
    return [
        Case(family, sizes, n, k, label) for family, (n, k) in weights for label, sizes in groupings
    ]


def small_cases() -> list[Case]:
    """Problems of 16 to 512 rows a group, where launch overhead and partial waves decide."""
    return [
        Case("small", balanced(e, e * rows), n, k, f"E{e} {rows} rows/group N{n} K{k}")
        for e in (8, 16, 32, 64)
        for rows in (16, 64, 512)
        for n, k in ((512, 512), (1024, 4096), (4096, 1024), (4096, 4096))
    ]


def smoke_cases() -> list[Case]:
    """Tiny problems that walk every path of the harness on a CPU; their times mean nothing."""
    sizes = (33, 0, 64, 7)
    label = f"E4 M{sum(sizes)} tiny"
    return [
        Case("gate_up", sizes, 32, 48, label),
        Case("down", sizes, 48, 16, label),
        Case("block", sizes, 32, 48, label),
        Case("small", balanced(8, 128), 64, 64, "E8 16 rows/group N64 K64"),
    ]


def rows_of(cases: Iterable[Case], modes: Iterable[str] = MODES) -> list[Row]:
    """Every operation of every case in every mode; the rows of a case stay together."""
    return [
        Row(case, op, mode)
        for case in cases
        for op, (families, _) in OPS.items()
        if case.family in families
        for mode in modes
    ]


def quick_rows(modes: Iterable[str] = MODES) -> list[Row]:
    """A subset for one minute: a balanced, a lognormal and a small problem."""
    wanted = {
        "gate_up E8 M131072 balanced": ("fwd", "dgrad", "dW", "ckpt ES"),
        "down E16 M131072 lognormal": ("fwd", "dgrad", "dW", "ckpt ES"),
        "small E16 64 rows/group N1024 K4096": ("fwd", "dgrad", "dW"),
    }
    rows = rows_of(large_cases() + small_cases(), modes)
    return [row for row in rows if row.op in wanted.get(row.case.name, ())]


def select(
    rows: Iterable[Row],
    pattern: str | re.Pattern[str] | None = None,
    ops: Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
) -> list[Row]:
    """The rows whose name has a match of pattern and whose op and mode are listed (None: all)."""
    regex = re.compile(pattern or "")
    return [
        row
        for row in rows
        if regex.search(row.name)
        and (ops is None or row.op in ops)
        and (modes is None or row.mode in modes)
    ]


def flops(case: Case, op: str) -> float:
    """Floating-point operations that one call needs, the same for every arm."""
    gate_up = 2.0 * case.m * case.n * case.k
    if case.family != "block":
        return OPS[op][1] * gate_up
    down = gate_up / 2  # [E, k, n // 2]: half the columns of h, as many rows and outputs
    return 4 * gate_up + OPS[op][1] * down


def estimate_seconds(row: Row, arms: int, groups: int, *, tflops: float = 650.0) -> float:
    """Rough wall time of one row; 650 TFLOP/s is about what an H200 sustains on these problems.

    An arm runs once per group and about five times more in the accuracy check and the warm-up.
    The fixed part is the flush before each call, the profiler, the graph captures and the data.
    """
    call = flops(row.case, row.op) / (tflops * 1e12)
    touched = row.case.m * (row.case.n + row.case.k) + row.case.experts * row.case.n * row.case.k
    return arms * (groups + 5) * (call + 0.4e-3) + 0.5 + touched * 2e-10
