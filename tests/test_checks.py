"""Bad calls: one clear error, the same from the real operator, on the meta device and from the fake.

Each row of the table is a call with one thing wrong. The message is compared as a whole; it begins with the
operator and says which argument, what was wanted and what was got. What ``out`` held is still there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from families import OPERATORS
from forms import (
    CANARY,
    E,
    K,
    M,
    N,
    assert_refused_alike,
    canary,
    good_arguments,
    zeros,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cake_ops
from cake_ops._library import OPS

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


class Bad(NamedTuple):
    name: str
    wrong: dict[str, Any]
    message: str


OFFS_DTYPE = (
    "offs must be int32 (cumulative ends of the groups), got {};"
    " use torch.cumsum(counts, 0, dtype=torch.int32)"
)
OFFS_COUNT = (
    "offs must have one end for each expert: w has E = 3, offs has {} entries;"
    " pass a CSR indptr [E + 1] as its view indptr[1:]"
)
FLOAT = "{} must be bfloat16, float16, float32 or float64, got {}; cast it"
ROUTER_FLOAT = "{} must be float32 or bfloat16, got {}; cast it with .float()"
ONE_DTYPE = (
    "{} and {} must have one dtype, got torch.bfloat16 and torch.float32;"
    " cast one of them or call under torch.autocast"
)
OUT_DTYPE = "out_dtype must be torch.bfloat16 or torch.float32 for torch.bfloat16 operands, got {}"
ROW_MAJOR = (
    "out must be row-major without overlap (unit stride on the last dimension), got strides {}"
    " for shape {}"
)
REQUIRES_GRAD = (
    "not differentiable, but {} requires grad; detach it, call under torch.no_grad(), or use the form"
    " without out"
)
BAD = [
    Bad("grouped_mm", {"x": zeros(K)}, "x must have shape [M, K], got [24]"),
    Bad("grouped_mm", {"x": zeros(M, K, dtype=torch.int64)}, FLOAT.format("x", "torch.int64")),
    Bad("grouped_mm", {"w": zeros(N, K)}, "w must have shape [E, N, K], got [40, 24]"),
    Bad("grouped_mm", {"w": zeros(E, N, K, dtype=FP32)}, ONE_DTYPE.format("x", "w")),
    Bad(
        "grouped_mm",
        {"w": zeros(E, N, 25)},
        "w must have shape [E, N, K] with K = x.shape[1] = 24, got [3, 40, 25]",
    ),
    Bad(
        "grouped_mm",
        {"w": zeros(E, K, N)},
        "w must have shape [E, N, K] with K = x.shape[1] = 24, got [3, 24, 40]; a weight stored as"
        " [E, K, N] is passed as w.transpose(-2, -1)",
    ),
    *(
        Bad(name, {"offs": torch.zeros(E, dtype=dtype)}, OFFS_DTYPE.format(dtype))
        for name in ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")
        for dtype in (torch.int64, torch.int16, FP32)
    ),
    *(
        Bad(
            name,
            {"offs": torch.zeros(shape, dtype=INT32)},
            f"offs must have shape [E], got {shape}",
        )
        for name in ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")
        for shape in ([E, 1], [])
    ),
    *(
        Bad(name, {"offs": torch.zeros(n, dtype=INT32)}, OFFS_COUNT.format(n))
        for name in ("grouped_mm", "grouped_mm_out", "grouped_mm_dgrad")
        for n in (0, E - 1, E + 1)
    ),
    Bad("grouped_mm_dgrad", {"g": zeros(2, M, N)}, "g must have shape [M, N], got [2, 10, 40]"),
    Bad(
        "grouped_mm_dgrad",
        {"w": zeros(E, 41, K)},
        "w must have N = g.shape[1] = 40 in dimension 1, got [3, 41, 24]",
    ),
    Bad(
        "grouped_mm_wgrad",
        {"x": zeros(11, K)},
        "x must have M = g.shape[0] = 10 in dimension 0, got [11, 24]",
    ),
    Bad("grouped_mm_wgrad", {"x": zeros(M, K, dtype=FP32)}, ONE_DTYPE.format("g", "x")),
    Bad("grouped_mm_wgrad", {"out_dtype": torch.float16}, OUT_DTYPE.format("torch.float16")),
    Bad(
        "grouped_mm_wgrad",
        {"g": zeros(M, N, dtype=FP32), "x": zeros(M, K, dtype=FP32), "out_dtype": BF16},
        "out_dtype must be torch.float32 for torch.float32 operands, got torch.bfloat16",
    ),
    Bad("grouped_mm_out", {"out": canary(M, 41)}, "out must have shape [10, 40], got [10, 41]"),
    Bad("grouped_mm_out", {"out": canary(M * N)}, "out must have shape [10, 40], got [400]"),
    Bad(
        "grouped_mm_out",
        {"out": canary(M, N, dtype=FP32)},
        "out must be torch.bfloat16, got torch.float32",
    ),
    Bad("grouped_mm_out", {"out": canary(N, M).t()}, ROW_MAJOR.format((1, 10), [10, 40])),
    Bad("grouped_mm_out", {"out": canary(M, 80)[:, ::2]}, ROW_MAJOR.format((80, 2), [10, 40])),
    Bad("grouped_mm_out", {"out": canary(N).expand(M, N)}, ROW_MAJOR.format((0, 1), [10, 40])),
    Bad(
        "grouped_mm_out",
        {"out": canary(800).as_strided((M, N), (39, 1))},
        ROW_MAJOR.format((39, 1), [10, 40]),
    ),
    Bad(
        "grouped_mm_out",
        {"x": zeros(M, K).requires_grad_(), "out": canary(M, N)},
        REQUIRES_GRAD.format("x"),
    ),
    Bad(
        "grouped_mm_dgrad_out", {"out": canary(M, N)}, "out must have shape [10, 24], got [10, 40]"
    ),
    Bad(
        "grouped_mm_wgrad_out",
        {"out": canary(E, N, 1).expand(E, N, K)},
        ROW_MAJOR.format((40, 1, 0), [3, 40, 24]),
    ),
    Bad(
        "grouped_mm_wgrad_",
        {"out": canary(E, N, K, dtype=torch.float16)},
        "out must be torch.bfloat16 or torch.float32, got torch.float16",
    ),
    Bad(
        "grouped_mm_wgrad_",
        {"out": canary(4, N, K)},
        "out must have shape [3, 40, 24], got [4, 40, 24]",
    ),
    Bad(
        "grouped_mm_wgrad_",
        {"out": canary(E, K, N).mT},
        ROW_MAJOR.format((960, 1, 40), [3, 40, 24]),
    ),
    Bad(
        "grouped_mm_wgrad_",
        {"out": canary(E, N, K).requires_grad_()},
        REQUIRES_GRAD.format("out"),
    ),
    Bad("router_mm", {"x": zeros(2, M, K)}, "x must have shape [T, H], got [2, 10, 24]"),
    Bad(
        "router_mm",
        {"x": zeros(M, K, dtype=torch.float64)},
        ROUTER_FLOAT.format("x", "torch.float64"),
    ),
    Bad(
        "router_mm",
        {"w": zeros(N, K, dtype=torch.float16)},
        ROUTER_FLOAT.format("w", "torch.float16"),
    ),
    Bad(
        "router_mm",
        {"w": zeros(N, 23)},
        "w must have H = x.shape[1] = 24 in dimension 1, got [40, 23]",
    ),
    Bad("router_mm_out", {"out": canary(M, N)}, "out must be torch.float32, got torch.bfloat16"),
    Bad(
        "router_mm_dgrad",
        {"w": zeros(41, K)},
        "w must have N = g.shape[1] = 40 in dimension 0, got [41, 24]",
    ),
    Bad(
        "router_mm_dgrad",
        {"out_dtype": torch.float64},
        "out_dtype must be torch.float32 or torch.bfloat16 for torch.bfloat16 operands, got"
        " torch.float64",
    ),
    Bad(
        "router_mm_wgrad",
        {"x": zeros(9, K)},
        "x must have T = g.shape[0] = 10 in dimension 0, got [9, 24]",
    ),
    Bad(
        "router_mm_wgrad_",
        {"out": canary(N, K, dtype=torch.float64)},
        "out must be torch.float32 or torch.bfloat16, got torch.float64",
    ),
    Bad(
        "split_bf16x3",
        {"x": zeros(3)},
        "x must be float32, got torch.bfloat16; cast it with .float()",
    ),
    Bad(
        "split_bf16x3",
        {"x": zeros(3, dtype=FP32).requires_grad_()},
        "not differentiable, but x requires grad; detach x first (rounding has no useful derivative)",
    ),
    Bad("dense_mm", {"x": zeros()}, "x must have shape [.., K], got a scalar"),
    Bad("dense_mm", {"x": zeros(M, K, dtype=torch.bool)}, FLOAT.format("x", "torch.bool")),
    Bad("dense_mm", {"w": zeros(1, N, K)}, "w must have shape [N, K], got [1, 40, 24]"),
    Bad(
        "dense_mm",
        {"w": zeros(N, 25)},
        "w must have K = x.shape[-1] = 24 in dimension 1, got [40, 25]",
    ),
    Bad("dense_mm", {"out_dtype": torch.float64}, OUT_DTYPE.format("torch.float64")),
    Bad("dense_mm_out", {"out": canary(20, N)}, "out must have shape [2, 10, 40], got [20, 40]"),
    Bad("dense_mm_dgrad", {"g": zeros()}, "g must have shape [.., N], got a scalar"),
    Bad(
        "dense_mm_dgrad",
        {"w": zeros(41, K)},
        "w must have N = g.shape[-1] = 40 in dimension 0, got [41, 24]",
    ),
    Bad(
        "dense_mm_wgrad",
        {"x": zeros(M, K)},
        "g [.., N] and x [.., K] must have the same number of dimensions, one at least, got"
        " [2, 10, 40] and [10, 24]",
    ),
    Bad(
        "dense_mm_wgrad",
        {"x": zeros(2, 11, K)},
        "x must have g.shape[1] = 10 in dimension 1, got [2, 11, 24]",
    ),
    Bad("batched_mm", {"x": zeros(M, K)}, "x must have shape [L, M, K], got [10, 24]"),
    Bad(
        "batched_mm",
        {"w": zeros(4, N, K)},
        "w must have L = x.shape[0] = 3 in dimension 0, got [4, 40, 24]",
    ),
    Bad(
        "batched_mm",
        {"w": zeros(E, N, 1)},
        "w must have K = x.shape[2] = 24 in dimension 2, got [3, 40, 1]",
    ),
    Bad("batched_mm_out", {"out": canary(E, N, M).mT}, ROW_MAJOR.format((400, 1, 10), [3, 10, 40])),
    Bad(
        "batched_mm_dgrad",
        {"w": zeros(E, 41, K)},
        "w must have N = g.shape[2] = 40 in dimension 1, got [3, 41, 24]",
    ),
    Bad(
        "batched_mm_wgrad",
        {"x": zeros(E, 11, K)},
        "x must have M = g.shape[1] = 10 in dimension 1, got [3, 11, 24]",
    ),
]


@pytest.mark.parametrize(
    "bad", BAD, ids=[f"{i}-{bad.name}-{next(iter(bad.wrong))}" for i, bad in enumerate(BAD)]
)
def test_h16_h18_bad_call_is_refused_alike_by_real_meta_and_fake(bad: Bad) -> None:
    arguments = good_arguments(bad.name) | bad.wrong
    if bad.name.endswith(("_out", "_")) and "out" not in arguments:
        arguments["out"] = canary(M, N)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    options = {name: value for name, value in arguments.items() if name not in names}

    def call(*tensors: Tensor) -> Any:
        operator = getattr(torch.ops.cake, bad.name)
        return operator(**dict(zip(names, tensors, strict=True)), **options)

    assert_refused_alike(
        f"cake::{bad.name}: {bad.message}", call, tuple(arguments[name] for name in names)
    )
    if "out" in arguments:
        assert (arguments["out"] == CANARY).all()


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_without_the_fault_are_served(name: str) -> None:
    """What the rows of the table start from is right."""
    arguments = good_arguments(name)
    result = getattr(torch.ops.cake, name)(**arguments)
    getattr(torch.ops.cake, f"{name}_out")(**arguments, out=result.fill_(CANARY))
    assert (result == 0).all()


OFFS = [bad for bad in BAD if "offs" in bad.wrong and not bad.name.endswith("_out")]


@pytest.mark.parametrize("bad", OFFS, ids=[f"{i}-{bad.name}" for i, bad in enumerate(OFFS)])
def test_h16_h18_bad_offs_are_refused_on_every_device(device: torch.device, bad: Bad) -> None:
    arguments = good_arguments(bad.name) | bad.wrong
    with pytest.raises(RuntimeError) as error:
        getattr(cake_ops, bad.name)(**{name: t.to(device) for name, t in arguments.items()})
    assert str(error.value) == f"cake::{bad.name}: {bad.message}"


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "split_bf16x3"])
def test_none_in_place_of_a_tensor(name: str, kind: str) -> None:
    """The dispatcher lets it pass."""
    good = good_arguments(name)
    if OPS[name].mutates:
        good["out"] = canary(1)
    with FakeTensorMode() if kind == "fake" else nullcontext():
        tensors = {
            arg: t if kind == "real" else torch.empty(t.shape, dtype=t.dtype, device="meta")
            for arg, t in good.items()
        }
        for arg in good:
            with pytest.raises(RuntimeError) as error:
                OPS[name].overload(**{**tensors, arg: None})
            assert str(error.value) == f"cake::{name}: {arg} must be a tensor, got None"


@pytest.mark.parametrize("moved", ["w", "offs", "out"])
def test_operands_on_two_devices(moved: str) -> None:
    arguments = good_arguments("grouped_mm_out") | {"out": canary(M, N)}
    arguments[moved] = arguments[moved].to("meta")
    with pytest.raises(RuntimeError) as error:
        torch.ops.cake.grouped_mm_out(**arguments)
    assert str(error.value) == (
        f"cake::grouped_mm_out: all tensors must be on one device; {moved} is on meta, the first"
        " argument on cpu"
    )
    if moved != "out":
        assert (arguments["out"] == CANARY).all()


@pytest.mark.gpu
@pytest.mark.parametrize("moved", ["x", "w", "offs"])
def test_h18_operands_on_cpu_and_gpu(moved: str) -> None:
    arguments = {name: t.cuda() for name, t in good_arguments("grouped_mm").items()}
    arguments[moved] = arguments[moved].cpu()
    with pytest.raises(
        RuntimeError, match="^cake::grouped_mm: all tensors must be on one device; "
    ):
        cake_ops.grouped_mm(**arguments)


@pytest.mark.parametrize("dtype", [torch.float16, FP32, torch.float64])
@pytest.mark.parametrize("name", ["grouped_mm", "dense_mm", "batched_mm"])
def test_gemms_on_cuda_take_bf16(name: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        arguments = {
            arg: torch.empty(t.shape, dtype=INT32 if arg == "offs" else dtype, device="cuda")
            for arg, t in good_arguments(name).items()
        }
        with pytest.raises(RuntimeError) as error:
            getattr(cake_ops, name)(**arguments)
    assert str(error.value) == (
        f"cake::{name}: x must be bfloat16 on CUDA, got {dtype}; cast it (x.bfloat16()) or call under"
        " torch.autocast('cuda', dtype=torch.bfloat16)"
    )


@pytest.mark.parametrize("make", ["fake", "negative", "out"])
def test_prepare_takes_plain_tensors_only(make: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    out = torch._neg_view(torch.empty(3, 5)) if make == "out" else None
    if make == "fake":
        mode = FakeTensorMode()
        x, w = mode.from_tensor(x), mode.from_tensor(w)
    if make == "negative":
        x = torch._neg_view(x)
        torch.testing.assert_close(cake_ops.dense_mm(x, w), x.resolve_neg() @ w.t())
    with pytest.raises(RuntimeError, match="plain tensors, got a (FakeTensor|Tensor)"):
        cake_ops.prepare("dense_mm", x, w, out=out)


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
def test_tensors_that_no_backend_has(function: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got no tensors"):
        function("dense_mm")
    with pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got meta"):
        function("dense_mm", torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta"))


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_h24_results_of_sizes_beyond_2_to_the_31(mode: str) -> None:
    """Shapes, strides and dtypes of results with more elements than an int32 counts."""
    rows, n, k, experts = 300_000, 8192, 8192, 8

    def check() -> None:
        def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta" if mode == "meta" else "cpu")

        offs = empty(experts, dtype=INT32)
        x, w, g = empty(rows, k), empty(experts, n, k), empty(rows, n)
        heads = empty(64, rows, 128), empty(64, n, 128), empty(64, rows, n)
        results = [
            (cake_ops.grouped_mm(x, w, offs), (rows, n), BF16),
            (cake_ops.grouped_mm_dgrad(g, w, offs), (rows, k), BF16),
            (cake_ops.grouped_mm_wgrad(g, x, offs), (experts, n, k), BF16),
            (cake_ops.grouped_mm_wgrad(g, x, empty(40, dtype=INT32)), (40, n, k), BF16),
            (cake_ops.router_mm(x, w[0]), (rows, n), FP32),
            (cake_ops.dense_mm(x, w[0]), (rows, n), BF16),
            (cake_ops.dense_mm_dgrad(g, w[0], out_dtype=FP32), (rows, k), FP32),
            (cake_ops.dense_mm_wgrad(g, x), (n, k), BF16),
            (cake_ops.batched_mm(*heads[:2]), (64, rows, n), BF16),
            (cake_ops.batched_mm_dgrad(heads[2], heads[1]), (64, rows, 128), BF16),
            (cake_ops.batched_mm_wgrad(heads[2], heads[0]), (64, n, 128), BF16),
        ]
        for result, shape, dtype in results:
            assert (tuple(result.shape), result.dtype) == (shape, dtype)
            assert result.is_contiguous() and result.device == x.device
        assert results[0][0].numel() == 2_457_600_000 > 2**31

    if mode == "meta":
        check()
    else:
        with FakeTensorMode():
            check()
