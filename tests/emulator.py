"""The grouped kernels on the CPU, from nothing but what a launch hands to the driver.

:class:`EmulatedPlan` stands in for ``cake_ops.cuda.launch.Plan``. It finds its operands through the
addresses, tensor maps and scalars of the launch, so a CPU test sees a route that passes a wrong
stride, copies the wrong operand or forgets to copy a result back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import pytest
import reference
import torch
from torch import Tensor

import cake_ops
from cake_ops._library import OPS, PLAIN
from cake_ops.cuda.geometry import ROWS, TensorMapGeometry
from cake_ops.cuda.launch import I32, I64, POINTER, Result

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SWIZZLE_BYTES = {"64B": 64, "128B": 128}


def tensor_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """The memory behind ``address`` as a tensor; strides in elements."""
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def with_rows(geometry: TensorMapGeometry, M: int) -> TensorMapGeometry:
    """The geometry of a launch with M rows."""
    return replace(geometry, dims=tuple(M if n == ROWS else n for n in geometry.dims))


def allocated(result: Result, a: Tensor) -> Tensor:
    """What a launch without a result allocates, as NaN."""
    sizes, strides, dtype = result
    sizes = (a.shape[0], *sizes[1:]) if sizes[0] == ROWS else sizes
    return torch.empty_strided(sizes, strides, dtype=dtype).fill_(float("nan"))


def assert_encodable(geometry: TensorMapGeometry, address: int) -> None:
    """The rules that cuTensorMapEncodeTiled has."""
    size = DTYPES[geometry.dtype].itemsize
    assert address % 16 == 0
    assert 1 <= geometry.rank <= 5
    assert len(geometry.strides) == geometry.rank - 1 and len(geometry.box) == geometry.rank
    assert all(0 < n <= 2**32 for n in geometry.dims)
    assert all(0 < s < 2**40 and s % 16 == 0 for s in geometry.strides)
    assert geometry.strides[0] >= geometry.dims[0] * size
    assert all(0 < n <= 256 for n in geometry.box)
    row = geometry.box[0] * size
    assert row % 16 == 0
    assert geometry.swizzle == "NONE" or row == SWIZZLE_BYTES[geometry.swizzle]


def through_map(geometry: TensorMapGeometry, address: int) -> Tensor:
    """What a map addresses, outermost dimension first."""
    size = DTYPES[geometry.dtype].itemsize
    strides = (*(s // size for s in reversed(geometry.strides)), 1)
    return tensor_at(address, DTYPES[geometry.dtype], geometry.dims[::-1], strides)


class EmulatedPlan:
    """A grouped kernel's plan whose launches compute at once; ``launched`` names them."""

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
    ) -> None:
        self.name, self.maps, self.parameters, self.result = name, maps, parameters, result

    def run(self, out: Tensor | None, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out = allocated(self.result, a) if out is None else out
        self.launched.append(self.name)
        operands = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        wgrad = self.name.startswith("sm90_grouped_gemm_wgrad")
        kinds = [POINTER, *[I64] * (1 + wgrad), POINTER, *[I32] * 4]
        assert [p if p == POINTER else p[0] for p in self.parameters] == kinds
        *strides, rows, N, K, E = [p[1] for p in self.parameters if p != POINTER]
        assert rows == ROWS
        M = a.shape[0]
        maps = [with_rows(geometry, M) for geometry in self.maps]
        assert len(maps) == 2 + wgrad
        for geometry, address in zip(maps, operands, strict=wgrad):
            assert_encodable(geometry, address)
            assert geometry.swizzle == "128B"
        if not wgrad:  # the kernel stores through a pointer, 16 bytes at a time
            assert out.data_ptr() % 16 == 0 == strides[0] % 8
            maps.append(TensorMapGeometry("bf16", (N, M), (2 * strides[0],), (64, 64)))
        ends = tensor_at(offs.data_ptr(), torch.int32, (E,), (1,)).clamp(0, M).cummax(0).values
        if wgrad:
            self._weight_gradient(maps, operands, ends.int(), M, N, K)
        else:
            self._rows(maps, operands, ends.int())
        result = through_map(maps[2], operands[2])
        assert strides[::-1] == list(result.stride()[:-1])
        assert result.shape == ((E, N, K) if wgrad else (M, N))
        assert out.shape == result.shape and out.stride() == result.stride()
        return out

    def _rows(self, maps: list[TensorMapGeometry], operands: tuple[int, ...], ends: Tensor) -> None:
        a, b, d = (through_map(*call) for call in zip(maps, operands, strict=True))
        if "_nn_" in self.name:
            b = b.transpose(1, 2)
        d.copy_(reference.grouped_mm(a, b, ends))

    def _weight_gradient(
        self,
        maps: list[TensorMapGeometry],
        operands: tuple[int, ...],
        ends: Tensor,
        M: int,
        N: int,
        K: int,
    ) -> None:
        g, x = (
            tensor_at(address, torch.bfloat16, (M, columns), (geometry.strides[0] // 2, 1))
            for geometry, address, columns in zip(maps, operands, (N, K), strict=False)
        )
        out = through_map(maps[2], operands[2])
        product = reference.grouped_mm_wgrad(g, x, ends)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        for e in range(len(ends)):
            if "_add_" not in self.name:
                out[e] = product[e]
            elif ends[e] > starts[e]:
                out[e] = out[e].double() + product[e]


@contextmanager
def emulated_family(
    monkeypatch: pytest.MonkeyPatch, family: str, routes: ModuleType, plan: type[Any]
) -> Iterator[list[str]]:
    """CPU tensors go through the CUDA backend of ``family``, whose module ``routes`` makes plans of the class
    ``plan``; yields the names of the kernels that are launched."""
    for name in OPS:
        if name.startswith(family):
            op = OPS[name]
            monkeypatch.setitem(op.launch, PLAIN["CPU"], op.launch[PLAIN["CUDA"]])
            if op.direct:
                monkeypatch.setitem(op.direct, PLAIN["CPU"], op.direct[PLAIN["CUDA"]])
            for table in (op.explain, op.prepare):
                if table:
                    monkeypatch.setitem(table, "CPU", table["CUDA"])
    monkeypatch.setattr(routes, "Plan", plan)
    monkeypatch.setattr(routes, "no_kernels_reason", lambda device: "")
    monkeypatch.setattr(routes, "num_sms", lambda device: 132)
    monkeypatch.setattr(plan, "launched", [])
    cake_ops.clear_caches()
    yield plan.launched
    cake_ops.clear_caches()
