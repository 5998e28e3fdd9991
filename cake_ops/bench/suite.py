"""What every benchmark does with its rows; a command brings a :class:`Suite` of them.

For every case the operands are drawn once; for every operation and mode each arm is called, its
outputs are filled with NaN, it is called again and checked against FP64, and only then the arms are
timed side by side (`timing.measure`). An arm that cannot run or is inaccurate is left out with its
reason; if that is cake itself, the row fails and the command ends with status 1.
"""

from __future__ import annotations

import gc
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .arms import Arm
from .progress import Progress
from .records import BASE, Results, row_record
from .shapes import Row
from .timing import Call, Device, host_us, measure

__all__ = ["Suite", "poison", "release_memory", "run", "run_row", "total_seconds"]

HOST_BELOW_US = 2000.0  # host time does not depend on the size: longer calls would only cost time


class Suite(ABC):
    """The rows and arms of one command, and all it knows about them.

    Operands are whatever the suite's own methods want: the harness only passes them on.
    """

    ops: ClassVar[Sequence[str]]
    arms: ClassVar[Sequence[str]]
    groups: ClassVar[int]  # paired groups a row, unless the user says otherwise
    rows_help: ClassVar[str]

    @abstractmethod
    def rows(self, which: str) -> list[Row]:
        """All rows, the "quick" ones for a minute, or the "smoke" ones for a CPU."""

    @abstractmethod
    def seconds(self, row: Row, arms: int, groups: int) -> float:
        """Rough wall time of a row on an H200."""

    @abstractmethod
    def flops(self, row: Row) -> float:
        """Floating-point operations that one call needs, the same for every arm."""

    @abstractmethod
    def operands(self, row: Row, device: Device, seed: int) -> Any:
        """Fresh operands of the row's case."""

    @abstractmethod
    def build(self, arm: str, row: Row, operands: Any) -> Arm:
        """One call of the row's operation by an arm."""

    @abstractmethod
    def check(
        self, arm: str, row: Row, operands: Any, outputs: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, float]]:
        """The relative error of the outputs and more figures of accuracy; raises past the bound."""

    def eligible(self, arm: str, row: Row, device: torch.device) -> bool:
        """Whether an arm belongs in a row at all; whether it runs is found out by calling it."""
        return True

    def remark(self, arm: str, row: Row) -> str | None:
        """What an arm does instead of the row's exact work."""
        return None

    def findings(self, device: Device, seed: int) -> dict[str, dict[str, Any]]:
        """Tables of the run as a whole, made after its rows: title -> name -> text or figures."""
        return {}


def total_seconds(suite: Suite, rows: Sequence[Row], arms: Sequence[str], groups: int) -> float:
    return sum(row_seconds(suite, row, arms, groups) for row in rows)


def row_seconds(suite: Suite, row: Row, arms: Sequence[str], groups: int) -> float:
    cuda = torch.device("cuda")
    return suite.seconds(row, sum(suite.eligible(arm, row, cuda) for arm in arms), groups)


def run(
    suite: Suite,
    rows: Sequence[Row],
    device: Device,
    arms: Sequence[str],
    groups: int,
    seed: int,
    results: Results,
) -> int:
    """Run the rows in order into results; return in how many of them cake failed."""
    failures = 0
    progress = Progress([(row.name, row_seconds(suite, row, arms, groups)) for row in rows])
    case = operands = None
    for i, row in enumerate(rows):
        progress.begin(i)
        if case is not row.case:
            operands = None  # before the next operands are allocated
            release_memory(device)
            case, operands = row.case, suite.operands(row, device, seed + i)
        try:
            record, detail = run_row(suite, row, device, operands, arms, groups)
        except RuntimeError as error:  # the other rows are still worth having
            failures += 1
            print(f"\nFAILED {row.name}: {error}", file=sys.stderr)
            continue
        results.add(record, {**detail, "seed": seed + i})
    try:
        results.meta |= suite.findings(device, seed)
    except RuntimeError as error:
        failures += 1
        print(f"\nFAILED findings: {error}", file=sys.stderr)
    results.save()
    progress.end()
    return failures


def release_memory(device: Device) -> None:
    """Frees what nothing refers to, and gives the allocator's memory back."""
    gc.collect()
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()


def run_row(
    suite: Suite, row: Row, device: Device, operands: Any, arms: Sequence[str], groups: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row and its detail, as `Results.add` takes them. Raises when cake cannot run it."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    accuracy: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    for arm in arms:
        if not suite.eligible(arm, row, device.torch_device):
            continue
        try:
            call, outputs_of = _prepared(row, device, suite.build(arm, row, operands))
            errors[arm], accuracy[arm] = suite.check(arm, row, operands, outputs_of())
            calls[arm] = call
        except Exception as error:  # a peer may raise anything; its reason is reported
            if arm == BASE:
                raise
            skipped[arm] = (str(error) or repr(error)).splitlines()[0]
    timings, clock_mhz = measure(device, calls, groups)
    us = {arm: timing.us for arm, timing in timings.items()}
    census = {arm: timing.census for arm, timing in timings.items() if device.sees_kernels}
    remarks = [f"{arm}: {text}" for arm in calls if (text := suite.remark(arm, row)) is not None]
    record = row_record(row.case.name, row.op, row.mode, us, errors)
    detail = {
        "flops": suite.flops(row),
        "us": us,
        "census": census,
        "host_us": _host(row, device, calls, us, census),
        "clock_mhz": clock_mhz,
        "accuracy": {arm: figures for arm, figures in accuracy.items() if figures},
        "skipped": skipped,
        "remarks": remarks,
    }
    return record, detail


def _prepared(
    row: Row, device: Device, arm: Arm
) -> tuple[Call, Callable[[], Mapping[str, Tensor]]]:
    """The call to time, and a function that runs it into poisoned memory for the check.

    In mode eager the outputs are new in every call; filled with NaN and freed, their memory is what
    the allocator hands to the next call of the same sizes.
    """
    if row.mode == "eager":

        def eager() -> Mapping[str, Tensor]:
            poison(arm())
            return arm()

        return arm, eager

    replay, outputs = device.capture(arm)

    def graph() -> Mapping[str, Tensor]:
        poison(outputs)
        replay()
        return outputs

    return replay, graph


def poison(outputs: Mapping[str, Tensor]) -> None:
    """Fills them with NaN, so that what a call leaves unwritten fails its check."""
    for output in outputs.values():
        output.fill_(float("nan"))


def _host(
    row: Row,
    device: Device,
    calls: dict[str, Call],
    us: Mapping[str, Sequence[float]],
    census: Mapping[str, Mapping[str, int]],
) -> dict[str, float]:
    """Host microseconds of an eager call by arm; empty where the row does not measure it."""
    longest = max(statistics.median(times) for times in us.values())
    if row.mode != "eager" or longest > HOST_BELOW_US:
        return {}
    launches = max((sum(kernels.values()) for kernels in census.values()), default=1)
    count = min(200, 900 // launches, int(20e3 / longest))
    return host_us(device, calls, calls=max(1, count))
