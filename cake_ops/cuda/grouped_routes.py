"""Routes of the grouped GEMMs: from the geometry of a call to a launch of an sm_90a kernel.

The kernels are those of ``csrc/kernels/sm90_grouped_gemm.cu`` and ``sm90_grouped_gemm_wgrad.cu``. The forward
and the data gradient are one problem, y = a b^T with a [M, K] and b [E, N, K] for the rows of each group: the
data gradient passes ``w`` with its last two dimensions swapped, and the kernel reads either memory order in
place. What a tensor map cannot address as it lies (rows that are no multiple of 16 bytes, no
unit stride) is copied first; :func:`cake_ops.explain` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._explanation import Explanation
from . import fallback
from .config import (
    ROWS,
    THREADS,
    TILE_K,
    GroupedConfig,
    TensorMapGeometry,
    grid,
    output_map,
    ragged_map,
    rows_bucket,
    rows_map,
    rows_output_map,
    select_config,
    weight_map,
)
from .device import no_kernels_reason, num_sms
from .fallback import pad8
from .launch import I32, I64, POINTER, Plan, Result
from .routes import Route, RouteCache, call_key, out_key, row_stride


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


def _copied(reason: str) -> Explanation:
    return Explanation("kernel after a copy", reason)


def _copy_reason(**operands: object) -> str:
    copied = [name for name, addressable in operands.items() if not addressable]
    return f"no unit stride or no 16-byte rows: {', '.join(copied)}"


def rows_route(out: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> Route:
    """out [M, N] = a [M, K] b [E, N, K]^T; of the tensors only the geometry is looked at."""
    (M, K), (E, N, _), device = a.shape, b.shape, a.get_device()
    M = rows_bucket(M)
    if M == 0 or N == 0:
        return Route(lambda out, a, b, offs: None, Explanation("no kernel", "the result is empty"))
    if E == 0 or K == 0:
        return Route(
            lambda out, a, b, offs: out.zero_(), Explanation("no kernel", "nothing is summed")
        )
    reason = no_kernels_reason(device)
    if reason:
        return Route(fallback.ragged_rows, Explanation("torch", reason))
    if N % 8 or K % 8:

        def run_padded(out, a, b, offs):
            wide = a.new_empty(a.shape[0], N + -N % 8)
            a, b = pad8(a, 1), pad8(b, 1, 2)
            into_route(rows_route, wide, a, b, offs).run(wide, a, b, offs)
            out.copy_(wide[:, :N])

        return Route(run_padded, _copied(f"N = {N} or K = {K} is no multiple of 8"))
    layout, strides = "nt", _stack_strides(b)
    if strides is None:
        layout, strides = "nn", _stack_strides(b.transpose(1, 2))
    lda, ldd, packed_offs = row_stride(a), row_stride(out), offs.is_contiguous()
    if not (lda and strides and ldd and packed_offs):

        def run_copied(out, a, b, offs):
            a = a if lda else _packed(a)
            b = b if strides else _packed(b)
            into = out if ldd else a.new_empty(a.shape[0], N)
            offs = offs.contiguous()
            into_route(rows_route, into, a, b, offs).run(into, a, b, offs)
            if into is not out:
                out.copy_(into)

        reason = _copy_reason(a=lda, w=strides, out=ldd, offs=packed_offs)
        return Route(run_copied, _copied(reason))
    config = select_config(layout, M, N, K, E, num_sms(device))
    maps = (rows_map(K, lda), weight_map(config, N, K, E, *strides), rows_output_map(N, ldd))
    result = (ROWS, N), out.stride(), out.dtype
    return _kernel_route(config, device, M, N, K, E, maps, (ldd,), result)


def dgrad_route(out: Tensor, g: Tensor, w: Tensor, offs: Tensor) -> Route:
    route = rows_route(out, g, w.transpose(1, 2), offs)
    if route.explanation.path == "kernel":  # it wants w's address only, and is spared the view
        return route
    run = route.run
    return Route(lambda out, g, w, offs: run(out, g, w.transpose(1, 2), offs), route.explanation)


def columns_route(
    out: Tensor, g: Tensor, x: Tensor, offs: Tensor, accumulate: bool = False
) -> Route:
    """out [E, N, K] (+)= g [M, N]^T x [M, K]."""
    (E, N, K), M, device = out.shape, rows_bucket(g.shape[0]), g.get_device()
    if 0 in (E, N, K):
        return Route(lambda out, g, x, offs: None, Explanation("no kernel", "the result is empty"))
    if M == 0:
        run_empty = (lambda *call: None) if accumulate else (lambda out, g, x, offs: out.zero_())
        return Route(run_empty, Explanation("no kernel", "nothing is summed"))
    reason = no_kernels_reason(device)
    if reason:
        return Route(
            lambda *call: fallback.ragged_columns(*call, accumulate), Explanation("torch", reason)
        )
    ldg, ldx, strides = row_stride(g), row_stride(x), _stack_strides(out)
    odd = N % 8 or K % 8
    if odd or not (ldg and ldx and strides and offs.is_contiguous()):

        def run_copied(out, g, x, offs):
            g = pad8(g, 1) if odd else g if ldg else _packed(g)
            x = pad8(x, 1) if odd else x if ldx else _packed(x)
            into = out
            if (odd or not strides) and accumulate:
                into = pad8(out, 1, 2)
            elif odd or not strides:
                into = g.new_empty(E, g.shape[1], x.shape[1], dtype=out.dtype)
            offs = offs.contiguous()
            make = columns_add_route if accumulate else columns_route
            into_route(make, into, g, x, offs).run(into, g, x, offs)
            if into is not out:
                out.copy_(into[:, :N, :K])

        reason = (
            f"N = {N} or K = {K} is no multiple of 8"
            if odd
            else _copy_reason(g=ldg, x=ldx, out=strides, offs=offs.is_contiguous())
        )
        return Route(run_copied, _copied(reason))
    output = ("f32" if out.dtype == torch.float32 else "bf16") + (
        "_add" if accumulate else "_store"
    )
    config = select_config("tn", M, N, K, E, num_sms(device), output)
    maps = (ragged_map(N, ldg), ragged_map(K, ldx), output_map(config, N, K, E, *strides))
    result = (E, N, K), out.stride(), out.dtype
    return _kernel_route(config, device, M, N, K, E, maps, strides, result)


def columns_add_route(out: Tensor, g: Tensor, x: Tensor, offs: Tensor) -> Route:
    return columns_route(out, g, x, offs, accumulate=True)


# ---- calls that write into a given tensor ----

_into_routes = RouteCache(lambda make, *call: make(*call), "into")


def into_route(make, out: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> Route:
    """The route of a checked call of the kind ``make`` that writes into ``out``."""
    b_has_rows = make not in (rows_route, dgrad_route)
    key = (make, *call_key(a, b, offs, b_has_rows), *out_key(out))
    return _into_routes.get(key) or _into_routes.add(key, make, out, a, b, offs)
