"""Routes of the router GEMMs: from the geometry of a call to a launch of an sm_90a kernel.

The kernel is that of ``csrc/kernels/sm90_router_gemm.cu``. It reads its A in FP32, and its B in FP32 or, where
B is x, in BF16. An operand that it cannot read as it lies (another dtype, rows that are no multiple of 16
bytes, no unit stride) is copied first; :func:`cake_ops.explain` says so. The result may lie anywhere. GPUs
without a kernel multiply in FP64 through torch, as the CPU does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._explanation import Explanation
from .._library import OPS
from .._problem import PROBLEMS
from ..cpu import router_mm as fp64
from .device import no_kernels_reason, num_sms
from .fallback import announce
from .geometry import ROWS, rows_bucket
from .launch import I32, I64, POINTER, Plan
from .router_config import (
    LAYOUTS,
    OUT_ADD,
    OUT_BF16,
    TILE_K,
    Dtype,
    RouterConfig,
    a_map,
    b_map,
    ctas_per_row_tile,
    grid,
    is_valid,
    kernel_sizes,
    max_ctas,
    policies,
    row_tile,
)
from .router_verdicts import TABLE
from .routes import AFTER_COPY, Route, RouteCache, out_key, row_stride, torch_route

_DTYPES: dict[Dtype, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16}


@functools.cache
def gpu_name(device: int) -> str:
    return torch.cuda.get_device_name(device)


def call_key(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, b_has_rows: bool = False
) -> tuple[Any, ...]:
    """The geometry of a call, and which verdicts there are. The first operand has T rows, the second
    should have as many with ``b_has_rows``; T enters as a bucket. Strides tell how many dimensions a
    tensor has, and only matrices come so far that their route is kept. Apart from the grouped
    :func:`cake_ops.cuda.routes.call_key`, as one made of a shared part costs each call 60 ns more."""
    b_shape = b.shape
    try:
        T, columns = a.shape
        rows = rows_bucket(T)
        if b_has_rows:
            b_rows, b_shape = b_shape
            rows = rows if T == b_rows else -1
    except ValueError:  # no matrix
        rows, columns = -1, -1
    return (
        TABLE.generation,
        out_dtype,
        rows,
        columns,
        b_shape,
        a.stride(),
        b.stride(),
        a.dtype,
        b.dtype,
        a.get_device(),
        b.get_device(),
        a.data_ptr() & 15,
        b.data_ptr() & 15,
    )


def make_route(op: str, out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> Route:
    """The route of a checked call; of the tensors only the geometry is looked at."""
    if out.numel() == 0:
        return torch_route(lambda out, a, b: None, "no kernel", "the result is empty")
    T, N, H = _sizes(op, a, b)
    if 0 in (T, N, H):
        run_empty = (lambda out, a, b: None) if accumulate else (lambda out, a, b: out.zero_())
        return torch_route(run_empty, "no kernel", "nothing is summed")
    device = a.get_device()
    reason = no_kernels_reason(device)
    if reason:
        multiply = getattr(fp64, op)

        def run_fp64(out: Tensor, a: Tensor, b: Tensor) -> None:
            announce(device)
            multiply(op, out, accumulate, a, b)

        return torch_route(run_fp64, "torch", f"{reason}; {fp64.HOW}")
    why_a, why_b, reason = _copies(op, a, b)
    if reason:
        a_dtype, b_dtype = _read_dtypes(op, a, b)

        def run_copied(out: Tensor, a: Tensor, b: Tensor) -> None:
            a = _copy(a, a_dtype) if why_a else a
            b = _copy(b, b_dtype) if why_b else b
            into_route(op, accumulate, out, a, b, _copied_routes).run(out, a, b)

        return torch_route(run_copied, "kernel after a copy", reason)
    b_dtype = _read_dtypes(op, a, b)[0 if LAYOUTS[op] == "nt" else 1]
    config, chosen_by = TABLE.choose(
        gpu_name(device), op, b_dtype, rows_bucket(T), N, H, num_sms(device)
    )
    return _kernel_route(op, config, chosen_by, out, a, b, accumulate)


def candidate_route(op: str, config: RouterConfig, out: Tensor, a: Tensor, b: Tensor) -> Route:
    """A route through ``config``, whatever the verdicts say, for a tuner that takes its time.

    Raises:
        RuntimeError: ``config`` cannot compute the call, or not on operands as they lie.
    """
    T, N, H = _sizes(op, a, b)
    reason = _copies(op, a, b)[2]
    read = _read_dtypes(op, a, b)[0 if LAYOUTS[op] == "nt" else 1]
    if (
        reason
        or (config.layout, config.b_dtype) != (LAYOUTS[op], read)
        or not is_valid(config, T, N, H)
    ):
        raise RuntimeError(
            f"cake::{op}: {config.name} cannot compute T = {T}, N = {N}, H = {H} from"
            f" {a.dtype} and {b.dtype}{reason and ': '}{reason}"
        )
    return _kernel_route(op, config, "caller", out, a, b, accumulate=False)


def _kernel_route(
    op: str,
    config: RouterConfig,
    chosen_by: str,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    accumulate: bool,
) -> Route:
    T, N, H = _sizes(op, a, b)
    swapped = config.layout == "nt"  # A is the call's second operand
    kernel_a, kernel_b = (b, a) if swapped else (a, b)
    lds = (row_stride(kernel_a), row_stride(kernel_b))
    maps = (a_map(config, ROWS, N, H, lds[0]), b_map(config, ROWS, N, H, lds[1]))
    ld_out = out.stride(0) if out.shape[0] > 1 else out.shape[1]
    output = OUT_BF16 * (out.dtype == torch.bfloat16) | OUT_ADD * accumulate
    strides = tuple((I64, ld) for ld in (ld_out, *lds))
    sizes = tuple((I32, size) for size in kernel_sizes(config.layout, ROWS, N, H))
    device = a.get_device()
    sms = num_sms(device)
    plan = Plan(
        config.symbol,
        device,
        ctas_per_row_tile(config, N, H),
        config.threads,
        config.smem_bytes,
        maps,
        (POINTER, POINTER, POINTER, *strides, *sizes, (I32, output)),
        ((N, H) if config.layout == "tn" else (ROWS, out.shape[1]), out.stride(), out.dtype),
        row_tile(config),
        max_ctas(config, sms),
        swapped,
    )
    explanation = Explanation(
        "kernel",
        kernel=config.symbol,
        tile=(config.tile_m, config.tile_n, TILE_K),
        stages=config.num_stages,
        cluster=config.cluster_k,
        grid=grid(config, T, N, H, sms),
        threads=config.threads,
        smem_bytes=config.smem_bytes,
        schedule="static, one CTA an SM" if config.cluster_k == 1 else "one tile a cluster",
        chosen_by=chosen_by,
    )
    return Route(plan.run, explanation)


# ---- operands ----


def _sizes(op: str, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """T, N, H."""
    return a.shape[0], a.shape[1] if op == "router_mm_wgrad" else b.shape[0], b.shape[1]


def _read_dtypes(op: str, a: Tensor, b: Tensor) -> tuple[Dtype, Dtype]:
    """What the kernel reads the call's operands as: its B, which is x in two operators, as BF16 too."""
    layout = LAYOUTS[op]
    kernel_b = a if layout == "nt" else b
    low = kernel_b.dtype == torch.bfloat16 and policies(layout, "bf16")
    read: Dtype = "bf16" if low else "f32"
    return (read, "f32") if layout == "nt" else ("f32", read)


def _copies(op: str, a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Why each operand is copied, or "", and the two as a sentence."""
    whys = []
    for t, dtype in zip((a, b), _read_dtypes(op, a, b), strict=True):
        if t.dtype != _DTYPES[dtype]:
            whys.append("bfloat16, read as float32")
        else:
            whys.append("" if row_stride(t) else "no unit stride or no 16-byte rows")
    named = zip(PROBLEMS[op].arguments, whys, strict=True)
    return *whys, "; ".join(f"{name}: {why}" for name, why in named if why)


def _copy(t: Tensor, dtype: Dtype) -> Tensor:
    """``t`` in rows of whole 16-byte units. What lies between them is outside of the tensor map."""
    rows, columns = t.shape
    granule = 16 // _DTYPES[dtype].itemsize
    wide = t.new_empty(rows, columns + -columns % granule, dtype=_DTYPES[dtype])
    return wide[:, :columns].copy_(t)


# ---- calls that write into a given tensor ----

Caches = dict[tuple[str, bool], RouteCache]
"""By operator, and whether it adds."""


def _caches(prefix: str = "") -> Caches:
    return {
        (op, accumulate): RouteCache(
            functools.partial(make_route, op, accumulate=accumulate), prefix + form, writes=True
        )
        for op in LAYOUTS
        for accumulate, form in ((False, f"{op}_out"), (True, f"{op}_"))
        if form in OPS
    }


_into_routes, _copied_routes = _caches(), _caches(AFTER_COPY)


def into_route(
    op: str, accumulate: bool, out: Tensor, a: Tensor, b: Tensor, caches: Caches = _into_routes
) -> Route:
    """The route of a checked call that writes into ``out``, or adds to it."""
    routes = caches[op, accumulate]
    key = (*call_key(a, b, None, op == "router_mm_wgrad"), *out_key(out))
    return routes.get(key) or routes.add(key, out, a, b)
