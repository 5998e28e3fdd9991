"""Routes of the grouped GEMMs: from the geometry of a call to a launch of an sm_90a kernel.

The kernels are those of ``csrc/kernels/sm90_grouped_gemm.cu`` and ``sm90_grouped_gemm_wgrad.cu``. The forward
and the data gradient are one problem, y = a b^T with a [M, K] and b [E, N, K] for the rows of each group: the
data gradient passes ``w`` with its last two dimensions swapped, and the kernel reads either memory order in
place. What a tensor map cannot address as it lies (rows that are no multiple of 16 bytes, no
unit stride) is copied first; :func:`cake_ops.explain` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._explanation import Explanation
from . import fallback
from .device import no_kernels_reason, num_sms
from .fallback import pad8
from .geometry import ROWS, TensorMapGeometry, rows_bucket
from .grouped_config import (
    THREADS,
    TILE_K,
    GroupedConfig,
    grid,
    output_map,
    ragged_map,
    rows_map,
    select_config,
    weight_map,
)
from .launch import I32, I64, POINTER, Plan, Result
from .routes import AFTER_COPY, Route, RouteCache, call_key, out_key, row_stride, torch_route


def _stack_strides(t: Tensor) -> tuple[int, int] | None:
    """``(row stride, outer stride)`` of a stack of matrices that a tensor map can address."""
    ld = row_stride(t)
    outer = t.stride(0) if t.shape[0] > 1 else t.shape[1] * ld
    granule = 16 // t.element_size()
    return (ld, outer) if ld and outer > 0 and outer % granule == 0 else None


def _packed(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _kernel_route(
    config: GroupedConfig, device: int, M: int, N: int, K: int, E: int,
    maps: tuple[TensorMapGeometry, ...], strides: tuple[int, ...], result: Result,
) -> Route:  # fmt: skip
    """A launch of either kernel for up to M rows; the parameters are the maps, the result and its
    strides, offs, sizes."""
    ctas = grid(config, M, N, K, E, num_sms(device))
    sizes = tuple((I32, size) for size in (ROWS, N, K, E))
    strides = tuple((I64, stride) for stride in strides)
    parameters = (POINTER, *strides, POINTER, *sizes)
    plan = Plan(config.symbol, device, ctas, THREADS, config.smem_bytes, maps, parameters, result)
    explanation = Explanation(
        "kernel",
        kernel=config.symbol,
        tile=(config.tile_m, config.tile_n, TILE_K),
        stages=config.num_stages,
        cluster=config.cluster_m,
        grid=ctas,
        threads=THREADS,
        smem_bytes=config.smem_bytes,
        schedule="static, one CTA an SM",
        chosen_by="cost model",
    )
    return Route(plan.run, explanation)


def _copied_route(run: Callable[..., Any], reason: str) -> Route:
    return torch_route(run, "kernel after a copy", reason)


def _size_reason(**sizes: int) -> str:
    """Which sizes have to be padded, or ""."""
    odd = (f"{name} = {size} is no multiple of 8" for name, size in sizes.items() if size % 8)
    return "; ".join(odd)


def _layout_reason(**operands: object) -> str:
    """Which operands no tensor map can address, or ""."""
    copied = ", ".join(name for name, addressable in operands.items() if not addressable)
    return copied and f"no unit stride or no 16-byte rows: {copied}"


def fwd_route(
    out: Tensor, a: Tensor, b: Tensor, offs: Tensor, names: tuple[str, str, str] = ("x", "N", "K")
) -> Route:
    """out [M, N] = a [M, K] b [E, N, K]^T; of the tensors only the geometry is looked at.

    ``names`` are the operator's for a, N and K.
    """
    (M, K), (E, N, _), device = a.shape, b.shape, a.get_device()
    a_name, n_name, k_name = names
    M = rows_bucket(M)
    if M == 0 or N == 0:
        return torch_route(lambda out, a, b, offs: None, "no kernel", "the result is empty")
    if E == 0 or K == 0:
        return torch_route(lambda out, a, b, offs: out.zero_(), "no kernel", "nothing is summed")
    reason = no_kernels_reason(device)
    if reason:
        return torch_route(fallback.ragged_m, "torch", reason)
    reason = _size_reason(**{n_name: N, k_name: K})
    if reason:

        def run_padded(out, a, b, offs):
            wide = a.new_empty(a.shape[0], N + -N % 8)
            a, b = pad8(a, 1), pad8(b, 1, 2)
            into_route(fwd_route, wide, a, b, offs, _copied_routes).run(wide, a, b, offs)
            out.copy_(wide[:, :N])

        return _copied_route(run_padded, reason)
    layout, strides = "nt", _stack_strides(b)
    if strides is None:
        layout, strides = "nn", _stack_strides(b.transpose(1, 2))
    lda, ldd = row_stride(a), row_stride(out)
    reason = _layout_reason(**{a_name: lda, "w": strides, "out": ldd, "offs": offs.is_contiguous()})
    if reason:

        def run_copied(out, a, b, offs):
            a = a if lda else _packed(a)
            b = b if strides else _packed(b)
            into = out if ldd else a.new_empty(a.shape[0], N)
            offs = offs.contiguous()
            into_route(fwd_route, into, a, b, offs, _copied_routes).run(into, a, b, offs)
            if into is not out:
                out.copy_(into)

        return _copied_route(run_copied, reason)
    config = select_config(layout, M, N, K, E, num_sms(device))
    maps = rows_map(K, lda), weight_map(config, N, K, E, *strides)
    result = (ROWS, N), out.stride(), out.dtype
    return _kernel_route(config, device, M, N, K, E, maps, (ldd,), result)


def dgrad_route(out: Tensor, g: Tensor, w: Tensor, offs: Tensor) -> Route:
    """dx [M, K] = g [M, N] w [E, N, K]: the rows' problem with N and K exchanged."""
    route = fwd_route(out, g, w.transpose(1, 2), offs, ("g", "K", "N"))
    if route.explanation.path == "kernel":  # it wants w's address only, and is spared the view
        return route
    run = route.run
    return Route(lambda out, g, w, offs: run(out, g, w.transpose(1, 2), offs), route.explanation)


def wgrad_route(out: Tensor, g: Tensor, x: Tensor, offs: Tensor, accumulate: bool = False) -> Route:
    """out [E, N, K] (+)= g [M, N]^T x [M, K]."""
    (E, N, K), M, device = out.shape, rows_bucket(g.shape[0]), g.get_device()
    if 0 in (E, N, K):
        return torch_route(lambda out, g, x, offs: None, "no kernel", "the result is empty")
    if M == 0:
        run_empty = (lambda *call: None) if accumulate else (lambda out, g, x, offs: out.zero_())
        return torch_route(run_empty, "no kernel", "nothing is summed")
    reason = no_kernels_reason(device)
    if reason:
        return torch_route(lambda *call: fallback.ragged_k(*call, accumulate), "torch", reason)
    ldg, ldx, strides = row_stride(g), row_stride(x), _stack_strides(out)
    odd = _size_reason(N=N, K=K)
    reason = odd or _layout_reason(g=ldg, x=ldx, out=strides, offs=offs.is_contiguous())
    if reason:

        def run_copied(out, g, x, offs):
            g = pad8(g, 1) if odd else g if ldg else _packed(g)
            x = pad8(x, 1) if odd else x if ldx else _packed(x)
            into = out
            if (odd or not strides) and accumulate:
                into = pad8(out, 1, 2)
            elif odd or not strides:
                into = g.new_empty(E, g.shape[1], x.shape[1], dtype=out.dtype)
            offs = offs.contiguous()
            make = wgrad_add_route if accumulate else wgrad_route
            into_route(make, into, g, x, offs, _copied_routes).run(into, g, x, offs)
            if into is not out:
                out.copy_(into[:, :N, :K])

        return _copied_route(run_copied, reason)
    output = ("f32" if out.dtype == torch.float32 else "bf16") + (
        "_add" if accumulate else "_store"
    )
    config = select_config("tn", M, N, K, E, num_sms(device), output)
    maps = ragged_map(N, ldg), ragged_map(K, ldx), output_map(config, N, K, E, *strides)
    result = (E, N, K), out.stride(), out.dtype
    return _kernel_route(config, device, M, N, K, E, maps, strides, result)


def wgrad_add_route(out: Tensor, g: Tensor, x: Tensor, offs: Tensor) -> Route:
    return wgrad_route(out, g, x, offs, accumulate=True)


# ---- calls that write into a given tensor ----

MakeRoute = Callable[[Tensor, Tensor, Tensor, Tensor], Route]
Caches = dict[MakeRoute, tuple[RouteCache, bool]]
"""The routes of each kind, and whether its operand b has rows."""


def _caches(prefix: str = "") -> Caches:
    forms = {
        fwd_route: ("grouped_mm_out", False),
        dgrad_route: ("grouped_mm_dgrad_out", False),
        wgrad_route: ("grouped_mm_wgrad_out", True),
        wgrad_add_route: ("grouped_mm_wgrad_", True),
    }
    return {
        make: (RouteCache(make, prefix + form, writes=True), b_has_rows)
        for make, (form, b_has_rows) in forms.items()
    }


_into_routes, _copied_routes = _caches(), _caches(AFTER_COPY)


def into_route(
    make: MakeRoute, out: Tensor, a: Tensor, b: Tensor, offs: Tensor, caches: Caches = _into_routes
) -> Route:
    """The route of a checked call of the kind ``make`` that writes into ``out``."""
    routes, b_has_rows = caches[make]
    key = (*call_key(a, b, offs, b_has_rows), *out_key(out))
    return routes.get(key) or routes.add(key, out, a, b, offs)
