"""Grouped GEMM on CUDA: the launches of every form of the three operators.

A launch finds its route by the call's geometry; only a geometry that is new is checked and planned. So a
repeated call costs a key, an allocation and a kernel launch. ``CAKE_CHECK_OFFS=1`` in the environment also
checks the values of ``offs`` at every call, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .._checks import check_offs_values
from .._environment import flag
from .._explanation import Explanation
from .._library import OPS, PLAIN, Direct
from .._problem import PROBLEMS
from .._serve import serve_into
from .device import no_kernels_reason
from .driver import kernel
from .grouped_config import policies
from .grouped_routes import (
    MakeRoute,
    dgrad_route,
    fwd_route,
    into_route,
    wgrad_add_route,
    wgrad_route,
)
from .routes import Route, RouteCache, allocating, call_key, direct_launch

CHECK_OFFS = flag("CAKE_CHECK_OFFS")


def load_kernels(device: int) -> None:
    """Loads every grouped kernel, if the device has them."""
    if no_kernels_reason(device):
        return
    outputs = ("bf16_store", "bf16_add", "f32_store", "f32_add")
    for config in (
        *policies("nt"),
        *policies("nn"),
        *(config for output in outputs for config in policies("tn", output)),
    ):
        kernel(config.symbol, device, config.smem_bytes)


def _check_offs(op: str, offs: Tensor, rows: int) -> None:
    if CHECK_OFFS and not torch.cuda.is_current_stream_capturing():
        check_offs_values(op, offs.tolist(), rows)


def _serve_plain(name: str, make: MakeRoute) -> None:
    """The form that allocates its result."""
    problem, b_has_rows = PROBLEMS[name], name.endswith("wgrad")

    def make_route(
        a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None
    ) -> Route:
        shape, dtype = problem.result(a, b, offs, out_dtype=out_dtype)
        geometry = torch.empty(shape, dtype=dtype, device="meta")  # nothing else is looked at
        route = make(geometry, a, b, offs)
        return allocating(route, partial(problem.allocate, out_dtype=out_dtype))

    routes = RouteCache(make_route, name)

    def launch_ragged_m(
        a: Tensor, b: Tensor, offs: Tensor, *, deterministic: bool = True
    ) -> Tensor:
        key = call_key(a, b, offs)
        route = routes.get(key) or routes.add(key, a, b, offs)
        if CHECK_OFFS:
            _check_offs(name, offs, a.shape[0])
        return route.run(None, a, b, offs)

    def launch_ragged_k(
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        deterministic: bool = True,
    ) -> Tensor:
        key = (out_dtype, call_key(a, b, offs, True))
        route = routes.get(key) or routes.add(key, a, b, offs, out_dtype)
        if CHECK_OFFS:
            _check_offs(name, offs, a.shape[0])
        return route.run(None, a, b, offs)

    def direct(
        a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None
    ) -> Direct | None:
        if CHECK_OFFS:
            return None
        key = call_key(a, b, offs, b_has_rows)
        return direct_launch(routes.get((out_dtype, key) if b_has_rows else key), a.shape[0])

    def explain(*tensors: Tensor, out_dtype=None, deterministic=True) -> Explanation:
        return make_route(*tensors, out_dtype).explanation

    def prepare(out: Tensor, *tensors: Tensor) -> tuple[Callable[[], None], Explanation]:
        route = into_route(make, out, *tensors)
        if route.explanation.path == "kernel after a copy":
            raise RuntimeError(
                f"cake::{name}: cannot prepare a launch on these tensors"
                f" ({route.explanation.reason}); copy them first"
            )
        return partial(route.run, out, *tensors), route.explanation

    op = OPS[name]
    op.serve("CUDA", launch_ragged_k if b_has_rows else launch_ragged_m)
    op.direct[PLAIN["CUDA"]] = direct
    op.explain["CUDA"], op.prepare["CUDA"] = explain, prepare


def _serve_into(name: str, make: MakeRoute, make_add: MakeRoute | None = None) -> None:
    """The forms that write, or with ``make_add`` add, into a tensor of the caller."""

    def write(op: str, out: Tensor, accumulate: bool, a: Tensor, b: Tensor, offs: Tensor) -> None:
        _check_offs(op, offs, a.shape[0])
        into_route(make_add if accumulate else make, out, a, b, offs).run(out, a, b, offs)

    def explain(op: str, out: Tensor, accumulate: bool, *tensors: Tensor) -> Explanation:
        return (make_add if accumulate else make)(out, *tensors).explanation

    serve_into("CUDA", name, write, explain)


_serve_plain("grouped_mm", fwd_route)
_serve_plain("grouped_mm_dgrad", dgrad_route)
_serve_plain("grouped_mm_wgrad", wgrad_route)
_serve_into("grouped_mm", fwd_route)
_serve_into("grouped_mm_dgrad", dgrad_route)
_serve_into("grouped_mm_wgrad", wgrad_route, wgrad_add_route)
