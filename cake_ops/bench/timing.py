"""How one row is timed: paired groups, a cold L2 and GPU intervals read from the profiler.

All arms of a row run in one profiler session. A group calls every arm once; groups rotate the order
of the arms and every second one mirrors it, so that a drift of clock or temperature falls on all
arms alike and a ratio is formed inside a group only. On the GPU's timeline a call looks like this:

    marker   fill of 256 MB   marker   kernels of the call   marker   fill ...

The markers are spin kernels, which no arm launches, so a call is all that lies between the second
marker and the next one: attribution needs neither correlation ids nor a common clock with the host,
holds for graph replays too, and a lost event breaks the pattern, which is reported instead of
averaged. The host synchronises after each call. The second marker spins for as long as the slowest
arm needs to enqueue its kernels: the interval from the first kernel's begin to the last one's end
then holds no time in which the GPU waits for Python. Host time is measured apart (`host_us`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "MARKER",
    "Call",
    "Device",
    "Event",
    "Timing",
    "arm_order",
    "backlog_us",
    "host_us",
    "interval_us",
    "measure",
    "split_calls",
]

MARKER = "spin_kernel"  # in the name of the kernel of torch.cuda._sleep

Call = Callable[[], object]


@dataclass(frozen=True)
class Event:
    """One kernel, memset or copy on the GPU's timeline."""

    name: str
    start_ns: int
    end_ns: int


@dataclass
class Timing:
    """One arm of one row: an interval per group, and what a call launches."""

    us: list[float]
    census: dict[str, int]


class Device(Protocol):
    """What `measure` needs to know about the hardware; the tests bring one of their own."""

    label: str
    torch_device: torch.device
    sees_kernels: bool  # whether the events are kernels, so that a census means something

    def start(self) -> None: ...
    def before_call(self, spin_us: float) -> None: ...
    def call(self, fn: Call) -> None: ...
    def synchronize(self) -> None: ...
    def stop(self) -> list[Event]: ...
    def clock_mhz(self) -> int | None: ...
    def capture(self, fn: Callable[[], object]) -> tuple[Call, object]: ...


def arm_order(arms: Sequence[str], group: int) -> list[str]:
    """The order of the arms in a group: rotated by one every two groups, every second mirrored."""
    shift = (group // 2) % len(arms)
    order = list(arms[shift:]) + list(arms[:shift])
    return order[::-1] if group % 2 else order


def split_calls(events: Sequence[Event], count: int) -> list[list[Event]]:
    """The events of each of the last count calls, by the markers around them.

    Raises RuntimeError when the timeline is not markers, fills and calls in their pattern.
    """
    events = sorted(events, key=lambda event: event.start_ns)
    marks = [i for i, event in enumerate(events) if MARKER in event.name]
    if len(marks) < 2 * count:
        raise RuntimeError(
            f"the profiler recorded {len(marks)} of {2 * count} markers: events were lost"
        )
    marks = marks[-2 * count :] + [len(events)]
    calls = []
    for i in range(count):
        first, second, following = marks[2 * i : 2 * i + 3]
        fills, call = second - first - 1, events[second + 1 : following]
        if fills != 1 or not call:
            raise RuntimeError(
                f"call {i} of {count} shows {fills} fills (expected 1) and {len(call)} kernels "
                "(expected some): events were lost, or the call launches nothing"
            )
        calls.append(call)
    return calls


def interval_us(call: Sequence[Event]) -> float:
    """From the first kernel's begin to the last kernel's end."""
    return (max(e.end_ns for e in call) - min(e.start_ns for e in call)) / 1e3


def backlog_us(device: Device, arms: dict[str, Call]) -> float:
    """Warm every arm up; return how long the GPU must stay busy so that no arm's host is late."""
    slowest = 0.0
    for fn in arms.values():
        for _ in range(2):  # the second call is the warm one
            device.synchronize()
            begin = time.perf_counter()
            fn()
            enqueue = time.perf_counter() - begin
        slowest = max(slowest, enqueue * 1e6)
    device.synchronize()
    return min(20.0 + 1.5 * slowest, 5000.0)


def measure(
    device: Device, arms: dict[str, Call], groups: int
) -> tuple[dict[str, Timing], list[int | None]]:
    """Time the arms in paired groups: a Timing for each, and the SM clock idle and under load.

    The group before the first counted one runs too and is dropped: it settles the clock and takes
    what a profiler may lose at its start.
    """
    spin_us = backlog_us(device, arms)
    clocks = [device.clock_mhz()]
    order = [name for group in range(-1, groups) for name in arm_order(list(arms), group)]
    device.start()
    try:
        for i, name in enumerate(order):
            device.before_call(spin_us)
            device.call(arms[name])
            if i == len(order) - 1:
                clocks.append(device.clock_mhz())  # before the synchronisation: under load
            device.synchronize()
    finally:
        events = device.stop()
    counted = order[len(arms) :]
    timings: dict[str, Timing] = {}
    for name, call in zip(counted, split_calls(events, len(counted)), strict=True):
        census = dict(Counter(event.name for event in call))
        timing = timings.setdefault(name, Timing([], census))
        if census != timing.census:
            raise RuntimeError(f"arm {name} launched {census} after {timing.census}")
        timing.us.append(interval_us(call))
    return {name: timings[name] for name in arms}, clocks


def host_us(
    device: Device, arms: dict[str, Call], *, calls: int = 200, rounds: int = 5
) -> dict[str, float]:
    """Host microseconds of one call: the median over interleaved rounds of back-to-back calls.

    Nothing synchronises inside a round. Keep calls times the launches of one call under the 1024
    launches that CUDA queues, or a GPU slower than the host is what gets measured.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for group in range(rounds):
        for name in arm_order(list(arms), group):
            fn = arms[name]
            device.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            samples[name].append((time.perf_counter() - begin) / calls * 1e6)
    device.synchronize()
    return {name: statistics.median(us) for name, us in samples.items()}
