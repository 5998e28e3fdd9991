"""The router kernel on the CPU, from nothing but what a launch hands to the driver.

:class:`EmulatedRouterPlan` stands in for ``cake_ops.cuda.launch.Plan``. It knows of a kernel what its name
says, expects the tensor maps that ``csrc/kernels/sm90_router_gemm.cu`` asks for, and finds its operands
through them. So a CPU test sees a route that passes a wrong stride, box, size or number of CTAs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from emulator import (
    DTYPES,
    allocated,
    assert_encodable,
    emulated_family,
    tensor_at,
    through_map,
    with_rows,
)
from torch import Tensor

from cake_ops.cuda import router_routes
from cake_ops.cuda.geometry import ROWS, TensorMapGeometry
from cake_ops.cuda.launch import I32, I64, POINTER, Result
from cake_ops.routing import reset_router_routes

GPU = "NVIDIA H200"


def boxes(
    layout: str, b_dtype: str, tile_m: int, tile_n: int
) -> tuple[tuple[str, tuple[int, int], str], ...]:
    """Element type, box and swizzle of A's and B's maps, as the kernel's header states them."""
    a = ("f32", (32, 32 if layout == "tn" else tile_m), "128B")
    b = {
        ("nt", "f32"): ((32, tile_n), "128B"),
        ("nt", "bf16"): ((32, tile_n), "64B"),
        ("nn", "f32"): ((tile_n, 32), "NONE"),
        ("tn", "f32"): ((tile_n, 32), "NONE"),
        ("tn", "bf16"): ((64, 32), "128B"),
    }[layout, b_dtype]
    return a, (b_dtype, *b)


class EmulatedRouterPlan:
    """A router kernel's plan whose launches compute at once; ``launched`` names them."""

    launched: ClassVar[list[str]] = []

    def __init__(
        self,
        name: str,
        device: int,
        grid: int,
        threads: int,
        smem_bytes: int,
        maps: tuple[TensorMapGeometry, ...],
        parameters: tuple[Any, ...],
        result: Result,
        tile_rows: int | None = None,
        max_ctas: int | None = None,
        swapped: bool = False,
    ) -> None:
        match = re.fullmatch(r"sm90_router_gemm_(nt|nn|tn)_(f32|bf16)_(\d+)x(\d+)_k(\d+)", name)
        assert match
        self.name, self.maps, self.parameters, self.result = name, maps, parameters, result
        self.layout, self.b_dtype = match[1], match[2]
        self.tile_m, self.tile_n, self.cluster_k = map(int, match.groups()[2:])
        self.grid, self.tile_rows, self.max_ctas, self.swapped = grid, tile_rows, max_ctas, swapped
        assert threads == 2 * self.tile_m + 256 and 0 < smem_bytes <= 227 * 1024
        assert swapped == (self.layout == "nt")

    def run(self, out: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        out = allocated(self.result, a) if out is None else out
        self.launched.append(self.name)
        rows = a.shape[0]
        assert rows > 0
        kinds = [p if p == POINTER else p[0] for p in self.parameters]
        assert kinds == [*[POINTER] * 3, *[I64] * 3, *[I32] * 4]
        ld, *lds, M, N, K, output = [p[1] for p in self.parameters[3:]]
        sizes = (M, N, K)
        assert sizes.count(ROWS) == 1
        M, N, K = (rows if size == ROWS else size for size in sizes)
        tiles = -(-M // self.tile_m) * -(-N // self.tile_n)
        ctas = self.grid * -(-rows // self.tile_rows) if self.tile_rows else self.grid
        assert ctas == tiles * self.cluster_k
        if self.cluster_k == 1:
            assert self.max_ctas == router_routes.num_sms(0)
        else:
            assert self.max_ctas >= ctas
        maps = [with_rows(geometry, rows) for geometry in self.maps]
        operands = (b, a) if self.swapped else (a, b)
        expected = boxes(self.layout, self.b_dtype, self.tile_m, self.tile_n)
        for geometry, operand, box, ld_operand in zip(maps, operands, expected, lds, strict=True):
            assert geometry.strides == (operand.element_size() * ld_operand,)
            assert_encodable(geometry, operand.data_ptr())
            assert geometry.rank == 2
            assert (geometry.dtype, geometry.box, geometry.swizzle) == box
            assert operand.dtype == DTYPES[geometry.dtype]
        a, b = (
            through_map(g, operand.data_ptr()) for g, operand in zip(maps, operands, strict=True)
        )
        a = a.t() if self.layout == "tn" else a
        b = b.t() if self.layout == "nt" else b
        assert a.shape == (M, K) and b.shape == (K, N)
        result = a.double() @ b.double()
        if self.layout == "nt":
            result = result.t()
        dtype = DTYPES["bf16" if output & 1 else "f32"]
        assert out.dtype == dtype and out.shape == result.shape
        to = tensor_at(out.data_ptr(), dtype, tuple(result.shape), (ld, 1))
        to.copy_(result + to.double() if output & 2 else result)
        return out


@contextmanager
def emulated_router(monkeypatch: pytest.MonkeyPatch, cache_home: str) -> Iterator[list[str]]:
    """The router as :func:`emulator.emulated_family`, on a GPU of a name and with a cache folder of its own."""
    monkeypatch.setattr(router_routes, "gpu_name", lambda device: GPU)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    reset_router_routes()
    with emulated_family(monkeypatch, "router_mm", router_routes, EmulatedRouterPlan) as launched:
        yield launched
    reset_router_routes()


def make(tokens: int = 63, experts: int = 40, hidden: int = 72) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, g in FP32."""
    x, w = torch.randn(tokens, hidden), torch.randn(experts, hidden)
    return x, w, torch.randn(tokens, experts)
