"""``python -m cake_ops.bench router --tune``: measures which kernel configuration serves which router call.

For every width H and number of tokens T a launch of each valid configuration of each operator is captured in
a CUDA graph and checked against FP64, and all are timed side by side as the arms of a benchmark are. The
fastest serves the window of T that ends there. The verdicts go to the user's cache
(:mod:`cake_ops.routing`) and are used from then on, in this process and in later ones; measurements of
other sizes stay. A forward's configurations all split the contraction alike, so tuning changes no bit of it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cake_ops._problem import PROBLEMS
from cake_ops.cuda.geometry import rows_bucket
from cake_ops.cuda.router_config import LAYOUTS, RouterConfig, candidates
from cake_ops.cuda.router_routes import candidate_route
from cake_ops.cuda.router_verdicts import store_verdicts
from cake_ops.routing import RouterRoute, router_routes

from .progress import Progress
from .router_arms import FP32_BOUND
from .router_cases import RouterCase, RouterData, measure_outputs
from .timing import Call, Device, measure

__all__ = ["TOKENS", "Problem", "problems", "tune", "verdicts"]

# The ends of the windows: every power of two, and half-way between them where tiles are few.
TOKENS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
GROUPS = 5

OUTPUTS = dict(zip(LAYOUTS, ("y", "dx", "dw"), strict=True))


@dataclass(frozen=True)
class Problem:
    """One operator at one size, with FP32 or BF16 tokens, and the configurations that can serve it."""

    op: str
    case: RouterCase
    dtype: str
    configs: tuple[RouterConfig, ...]

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} {self.case.name}"

    @property
    def x_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def tensors(self, data: RouterData) -> tuple[Tensor, Tensor]:
        """The operator's arguments; x in the problem's dtype."""
        x, w, g = data.x.to(self.x_dtype), data.w, data.g
        return {"router_mm": (x, w), "router_mm_dgrad": (g, w), "router_mm_wgrad": (g, x)}[self.op]


def problems(case: RouterCase, num_sms: int) -> Iterator[Problem]:
    """What can be tuned at one size; the first configuration is the cost model's."""
    for op in LAYOUTS:
        for dtype in ("f32", "bf16"):
            sizes = rows_bucket(case.tokens), case.experts, case.hidden
            configs = candidates(op, *sizes, dtype, num_sms)
            if configs:
                yield Problem(op, case, dtype, configs)


def tune(
    device: Device, hidden: Sequence[int], experts: int, seed: int, table: Path | None = None
) -> Path:
    """Measures, prints and stores the verdicts; returns the file they are stored in.

    table: a JSON file that receives the time of every configuration.
    """
    gpu = torch.cuda.get_device_name(device.torch_device)
    num_sms = torch.cuda.get_device_properties(device.torch_device).multi_processor_count
    cases = [RouterCase(h, tokens, experts) for h in hidden for tokens in TOKENS]
    progress = Progress([(f"tune {case.name}", 1.0) for case in cases])
    times: dict[Problem, dict[str, float]] = {}
    for i, case in enumerate(cases):
        progress.begin(i)
        data = RouterData.random(case, device.torch_device, seed + i)
        times |= measure_case(device, data, list(problems(case, num_sms)))
    progress.end()
    for problem, us in times.items():
        print(_line(problem, us))
    path = store_verdicts(gpu, [*_kept(gpu, times), *verdicts(times)])
    if table is not None:
        rows = [{"problem": problem.name, "us": us} for problem, us in times.items()]
        table.write_text(json.dumps({"gpu": gpu, "rows": rows}, indent=1) + "\n")
    return path


def measure_case(
    device: Device, data: RouterData, problems: Sequence[Problem]
) -> dict[Problem, dict[str, float]]:
    """Median microseconds of every configuration of the problems of one size, all timed together."""
    calls: dict[str, Call] = {}
    for problem in problems:
        a, b = problem.tensors(data)
        exact = RouterData(data.case, data.x.to(problem.x_dtype).float(), data.w, data.g)
        out = PROBLEMS[problem.op].allocate(a, b)
        for config in problem.configs:
            route = candidate_route(problem.op, config, out, a, b)
            replay, _ = device.capture(partial(route.run, out, a, b))
            out.fill_(float("nan"))
            replay()
            measure_outputs(exact, {OUTPUTS[problem.op]: out}, FP32_BOUND)
            calls[f"{problem.name} {config.name}"] = replay
    timings, _ = measure(device, calls, GROUPS)
    return {
        problem: {
            config.name: statistics.median(timings[f"{problem.name} {config.name}"].us)
            for config in problem.configs
        }
        for problem in problems
    }


def verdicts(times: dict[Problem, dict[str, float]]) -> list[RouterRoute]:
    """The fastest configuration of each problem, for the tokens from the next smaller one's on."""
    found = []
    for problem, us in times.items():
        case, best = problem.case, min(us, key=us.__getitem__)
        i = TOKENS.index(case.tokens)
        found.append(
            RouterRoute(
                problem.op,
                best,
                N=case.experts,
                H=case.hidden,
                min_T=TOKENS[i - 1] + 1 if i else 1,
                max_T=case.tokens if i + 1 < len(TOKENS) else None,
                us=round(us[best], 3),
            )
        )
    return found


def _kept(gpu: str, times: dict[Problem, Any]) -> list[RouterRoute]:
    """The user's measurements of sizes that were not measured now."""
    again = {(problem.case.experts, problem.case.hidden) for problem in times}
    return [
        route
        for route in router_routes()
        if route.source == "tuned" and route.gpu == gpu and (route.N, route.H) not in again
    ]


def _line(problem: Problem, us: dict[str, float]) -> str:
    best, model = min(us, key=us.__getitem__), problem.configs[0].name
    return f"{problem.name:34} {best:20} {us[best]:8.2f} us; the model's {model:20} {us[model]:8.2f} us"
