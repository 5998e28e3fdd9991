"""The hardware that `timing.measure` drives: a CUDA device through CUPTI, or a CPU as a smoke test."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import cake_ops

from .timing import MARKER, Call, Device, Event

__all__ = ["CpuDevice", "CudaDevice", "gpu_events", "run_meta"]

FLUSH_BYTES = 256 << 20  # four times the 60 MB L2 of an H200


def gpu_events(recorded: Iterable[Any]) -> list[Event]:
    """The GPU's part of what torch.profiler recorded (its raw Kineto events)."""
    return [
        Event(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


class CudaDevice:
    """The current CUDA device, its timeline read through CUPTI by torch.profiler."""

    sees_kernels = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.label = properties.name
        self._uuid = f"GPU-{properties.uuid}"
        self._fill = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def before_call(self, spin_us: float) -> None:
        torch.cuda._sleep(1000)
        self._fill.fill_(1)
        torch.cuda._sleep(int(spin_us * 2000))  # cycles, at up to 2 GHz

    def call(self, fn: Call) -> None:
        fn()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def stop(self) -> list[Event]:
        assert self._profile is not None
        self.synchronize()
        self._profile.stop()
        recorded = self._profile.profiler.kineto_results.events()
        self._profile = None
        return gpu_events(recorded)

    def clock_mhz(self) -> int | None:
        try:
            import pynvml
        except ImportError:
            answer = self.nvidia_smi("clocks.sm")
            return int(answer) if answer.isdigit() else None
        try:
            return torch.cuda.clock_rate(self.torch_device)  # a millisecond, nvidia-smi fifty
        except (RuntimeError, pynvml.NVMLError):
            return None

    def nvidia_smi(self, field: str) -> str:
        """One field of nvidia-smi for this device; "unknown" where the tool is missing."""
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        try:
            run = subprocess.run(
                [*command, f"--id={self._uuid}"],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        return run.stdout.strip() if run.returncode == 0 else "unknown"

    def capture(self, fn: Callable[[], object]) -> tuple[Call, object]:
        """Capture one call in a CUDA graph: its replay, and the outputs the replay writes."""
        side = torch.cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fn()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = fn()

        def replay() -> None:
            graph.replay()

        replay.holds = (
            fn  # and so the operands that only fn refers to: a graph knows addresses alone
        )
        return replay, outputs


class CpuDevice:
    """Wall-clock smoke mode: the whole harness on a CPU, with figures that compare nothing."""

    sees_kernels = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.label = "CPU smoke run (perf_counter, no cold cache)"
        self._events: list[Event] = []

    def start(self) -> None:
        self._events = []

    def before_call(self, spin_us: float) -> None:
        for name in (MARKER, "no fill", MARKER):
            now = time.perf_counter_ns()
            self._events.append(Event(name, now, now))

    def call(self, fn: Call) -> None:
        begin = time.perf_counter_ns()
        fn()
        self._events.append(Event("call on the CPU", begin, time.perf_counter_ns()))

    def synchronize(self) -> None:
        pass

    def stop(self) -> list[Event]:
        return self._events

    def clock_mhz(self) -> int | None:
        return None

    def capture(self, fn: Callable[[], object]) -> tuple[Call, object]:
        raise RuntimeError("mode graph needs a CUDA device; a CPU has eager only")


def run_meta(device: Device) -> dict[str, str]:
    """Where and when this runs, in the keys of the JSON file."""
    smi = device.nvidia_smi("driver_version") if isinstance(device, CudaDevice) else "none"
    return {
        "gpu": device.label,
        "driver": smi,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "cake_ops": cake_ops.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "cake_ops.bench", *sys.argv[1:]]),
    }
