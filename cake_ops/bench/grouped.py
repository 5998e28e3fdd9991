"""``python -m cake_ops.bench grouped``: the grouped GEMM against its peers, row by row.

For every case the operands are drawn once; for every operation and mode each arm is called, its
outputs are filled with NaN, it is called again and checked against FP64, and only then the arms are
timed side by side (`timing.measure`). An arm that cannot run or is inaccurate is left out with its
reason; if that is cake itself, the row fails and the command ends with status 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

from . import arms as arm_module
from . import command, shapes
from .accuracy import Data, Reference, relative_error
from .arms import ARMS, Arm
from .shapes import Row
from .suite import Suite
from .timing import Device

__all__ = ["SUITE", "add_arguments", "main"]

Operands = tuple[Data, Reference]


class Grouped(Suite):
    ops = tuple(shapes.OPS)
    arms = ARMS
    groups = 10
    rows_help = (
        'only rows whose name matches, e.g. "^gate_up" or "E8 .*dgrad, graph"; the families '
        "^gate_up, ^down, ^block and ^small are four parts of the whole run, to be joined by merge"
    )

    def rows(self, which: str) -> list[Row]:
        if which == "smoke":
            return shapes.rows_of(shapes.smoke_cases(), ("eager",))
        if which == "quick":
            return shapes.quick_rows()
        return shapes.rows_of(shapes.large_cases() + shapes.small_cases())

    def seconds(self, row: Row, arms: int, groups: int) -> float:
        return shapes.estimate_seconds(row, arms, groups)

    def flops(self, row: Row) -> float:
        return shapes.flops(row.case, row.op)

    def operands(self, row: Row, device: Device, seed: int) -> Operands:
        data = Data.random(row.case, device.torch_device, seed)
        return data, Reference(data, seed)

    def build(self, arm: str, row: Row, operands: Operands) -> Arm:
        return arm_module.build(arm, row.op, operands[0])

    def check(
        self, arm: str, row: Row, operands: Operands, outputs: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, float]]:
        rounded = arm_module.rounded(arm, row.op)
        return relative_error(operands[1], row.op, outputs, rounded=rounded), {}

    def eligible(self, arm: str, row: Row, device: torch.device) -> bool:
        return arm_module.eligible(arm, row.case, row.op, device)

    def remark(self, arm: str, row: Row) -> str | None:
        return arm_module.remark(arm, row.op)


SUITE = Grouped()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser, SUITE)
    parser.add_argument("--no-deepgemm", action="store_true", help="leave deepgemm out")


def main(args: argparse.Namespace) -> int:
    if args.no_deepgemm:
        wanted = command.chosen(args.arms, SUITE.arms, "arm") or SUITE.arms
        args.arms = ",".join(["cake", *(arm for arm in wanted if arm != "deepgemm")])
    return command.main(args, SUITE)
