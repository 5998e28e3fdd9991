"""FP32 router GEMM on CUDA: the launches of every form of the three operators.

A launch finds its route by the call's geometry and the generation of the verdicts; only a call that is new
in one of them is checked and planned. So a repeated call costs a key, an allocation and a kernel launch.
No kernel adds in arrival order: ``deterministic`` changes nothing, and is part of no key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .._explanation import Explanation
from .._library import OPS, PLAIN, Direct
from .._problem import PROBLEMS
from .._serve import serve, serve_into
from ..cpu import router_mm as fp64
from .device import no_kernels_reason
from .driver import kernel
from .router_config import LAYOUTS, all_configs
from .router_routes import call_key, into_route, make_route
from .routes import Route, RouteCache, allocating, direct_launch


def load_kernels(device: int) -> None:
    """Loads every router kernel, if the device has them."""
    if not no_kernels_reason(device):
        for config in all_configs():
            kernel(config.symbol, device, config.smem_bytes)


def _serve(name: str) -> None:
    problem, b_has_rows = PROBLEMS[name], LAYOUTS[name] == "tn"

    def make(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Route:
        shape, dtype = problem.result(a, b, out_dtype=out_dtype)
        geometry = torch.empty(shape, dtype=dtype, device="meta")  # nothing else is looked at
        route = make_route(name, geometry, a, b)
        return allocating(route, partial(problem.allocate, out_dtype=out_dtype))

    routes = RouteCache(make, name)

    def launch(
        a: Tensor,
        b: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        deterministic: bool = True,
    ) -> Tensor:
        key = call_key(a, b, out_dtype, b_has_rows)
        route = routes.get(key) or routes.add(key, a, b, out_dtype)
        return route.run(None, a, b)

    def direct(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Direct | None:
        return direct_launch(routes.get(call_key(a, b, out_dtype, b_has_rows)), a.shape[0])

    def write(op: str, out: Tensor, accumulate: bool, a: Tensor, b: Tensor) -> None:
        into_route(name, accumulate, out, a, b).run(out, a, b)

    def explain(*tensors: Tensor, out_dtype=None, deterministic=True) -> Explanation:
        return make(*tensors, out_dtype).explanation

    def explain_into(op: str, out: Tensor, accumulate: bool, a: Tensor, b: Tensor) -> Explanation:
        return make_route(name, out, a, b, accumulate).explanation

    def prepare(out: Tensor, *tensors: Tensor) -> tuple[Callable[[], None], Explanation]:
        route = into_route(name, False, out, *tensors)
        if route.explanation.path == "kernel after a copy":
            raise RuntimeError(
                f"cake::{name}: cannot prepare a launch on these tensors"
                f" ({route.explanation.reason}); copy them first"
            )
        return partial(route.run, out, *tensors), route.explanation

    op = OPS[name]
    op.serve("CUDA", launch)
    op.direct[PLAIN["CUDA"]] = direct
    op.explain["CUDA"], op.prepare["CUDA"] = explain, prepare
    serve_into("CUDA", name, write, explain_into)


for _name in LAYOUTS:
    _serve(_name)
serve("CUDA", "split_bf16x3", fp64.split_bf16x3, "bit operations")
