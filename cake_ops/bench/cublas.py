"""cuBLAS and cuBLASLt called directly: FP32 products without a library in between, for the router's arms.

torch.mm leaves the choice of algorithm to cuBLAS. To know how fast FP32 can be here, the benchmark calls
cublasSgemm itself and times everything that cuBLASLt's heuristics propose. The two libraries are the ones
torch has loaded, reached through ctypes; values and layouts are those of cuBLAS 13's headers `cublas_api.h`
and `cublasLt.h`, unchanged since CUDA 11.

Both libraries store matrices by columns. A row-major result is the column-major one of the transposed
product, out^T = b^T a^T, so every call here hands over b first.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Algorithm", "CublasError", "Lt", "Sgemm", "column_major"]

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper, and what torch gives cuBLAS there
CANDIDATES = 64  # more than the heuristics have ever proposed

CUDA_R_32F = 0
OP_N, OP_T = 0, 1
DEFAULT_MATH = 0  # FP32 products in FP32: TF32 is a mode of its own
# FP32 products, and FP32 emulated by nine BF16 products, which cuBLAS 13 has for some GPUs. For others, an H200
# among them, it proposes FP32 kernels (SIMT, by the profiler) under this type too, in another order.
COMPUTE_TYPES = {"FP32": 68, "BF16x9": 78}
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES = 1


class CublasError(RuntimeError):
    """A call that failed, or a library that is not loaded."""


class MatmulAlgo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", MatmulAlgo),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_P = c_void_p
SIGNATURES = {
    "cublas": {
        "cublasCreate_v2": (POINTER(_P),),
        "cublasSetStream_v2": (_P, _P),
        "cublasSetWorkspace_v2": (_P, _P, c_size_t),
        "cublasSetMathMode": (_P, c_int),
        "cublasSgemm_v2": (
            *(_P, c_int, c_int, c_int, c_int, c_int),
            *(POINTER(c_float), _P, c_int, _P, c_int, POINTER(c_float), _P, c_int),
        ),
    },
    "cublasLt": {
        "cublasLtCreate": (POINTER(_P),),
        "cublasLtMatmulDescCreate": (POINTER(_P), c_int, c_int),
        "cublasLtMatmulDescSetAttribute": (_P, c_int, _P, c_size_t),
        "cublasLtMatrixLayoutCreate": (POINTER(_P), c_int, c_uint64, c_uint64, c_int64),
        "cublasLtMatmulPreferenceCreate": (POINTER(_P),),
        "cublasLtMatmulPreferenceSetAttribute": (_P, c_int, _P, c_size_t),
        "cublasLtMatmulPreferenceDestroy": (_P,),
        "cublasLtMatmulAlgoGetHeuristic": (
            *(_P, _P, _P, _P, _P, _P, _P, c_int),
            *(POINTER(HeuristicResult), POINTER(c_int)),
        ),
        "cublasLtMatmul": (
            *(_P, _P, POINTER(c_float), _P, _P, _P, _P, POINTER(c_float), _P, _P, _P, _P),
            *(POINTER(MatmulAlgo), _P, c_size_t, _P),
        ),
    },
}


def column_major(t: Tensor) -> tuple[int, int]:
    """(operation, leading dimension) with which the library reads t^T from t's memory."""
    if t.stride(1) == 1:
        return OP_N, t.stride(0)
    if t.stride(0) == 1:
        return OP_T, t.stride(1)
    raise CublasError(f"a matrix needs a unit stride, got strides {t.stride()}")


def mapped(name: str, maps: str) -> str | None:
    """The file of a shared library in the text of /proc/self/maps."""
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if f"/{name}.so" in line)
    return next(paths, None)


def open_library(name: str) -> Any:
    """A library that is in this process. Its functions check their arguments and raise on failure."""
    path = mapped(f"lib{name}", Path("/proc/self/maps").read_text())
    if path is None:
        raise CublasError(f"lib{name} is not loaded in this process: torch has no CUDA")
    library = ctypes.CDLL(path)
    for function, arguments in SIGNATURES[name].items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).errcheck = _check
    return library


def _check(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if status:
        raise CublasError(f"{function.__name__} failed with status {status}")
    return status


class Sgemm:
    """cublasSgemm on a handle and a workspace of its own, with default math."""

    def __init__(self, device: torch.device) -> None:
        self._library = open_library("cublas")
        self._device = device.index
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._stream: int | None = None
        self._one, self._zero = c_float(1), c_float(0)
        self._handle = c_void_p()
        self._library.cublasCreate_v2(byref(self._handle))
        self._library.cublasSetMathMode(self._handle, DEFAULT_MATH)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a [M, K] times b [K, N], FP32, either one transposed or not."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream != self._stream:  # a new stream makes the handle forget its workspace
            workspace = self._workspace.data_ptr()
            self._library.cublasSetStream_v2(self._handle, stream)
            self._library.cublasSetWorkspace_v2(self._handle, workspace, WORKSPACE_BYTES)
            self._stream = stream
        (m, k), n = a.shape, b.shape[1]
        out = a.new_empty(m, n)
        (op_a, ld_a), (op_b, ld_b) = column_major(a), column_major(b)
        self._library.cublasSgemm_v2(
            *(self._handle, op_b, op_a, n, m, k, byref(self._one), b.data_ptr(), ld_b),
            *(a.data_ptr(), ld_a, byref(self._zero), out.data_ptr(), n),
        )
        return out


class Lt:
    """cuBLASLt on one device, with one workspace."""

    def __init__(self, device: torch.device) -> None:
        self.library = open_library("cublasLt")
        self.device = device.index
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.one, self.zero = c_float(1), c_float(0)
        self.handle = c_void_p()
        self.library.cublasLtCreate(byref(self.handle))

    def algorithms(self, a: Tensor, b: Tensor) -> list[Algorithm]:
        """All that the heuristics propose for a [M, K] times b [K, N], the likeliest first."""
        return [
            Algorithm(self, problem, result)
            for problem in (Problem(self.library, compute, a, b) for compute in COMPUTE_TYPES)
            for result in self._heuristics(problem)
            if result.state == 0 and result.workspace_bytes <= WORKSPACE_BYTES
        ]

    def _heuristics(self, problem: Problem) -> list[HeuristicResult]:
        preference, count = c_void_p(), c_int()
        results = (HeuristicResult * CANDIDATES)()
        self.library.cublasLtMatmulPreferenceCreate(byref(preference))
        try:
            self.library.cublasLtMatmulPreferenceSetAttribute(
                preference, PREF_MAX_WORKSPACE_BYTES, byref(c_uint64(WORKSPACE_BYTES)), 8
            )
            self.library.cublasLtMatmulAlgoGetHeuristic(
                *(self.handle, problem.operation, problem.b, problem.a, problem.out, problem.out),
                *(preference, CANDIDATES, results, byref(count)),
            )
        except CublasError:  # this GPU has no such compute type: there is nothing to propose
            return []
        finally:
            self.library.cublasLtMatmulPreferenceDestroy(preference)
        return [HeuristicResult.from_buffer_copy(result) for result in results[: count.value]]


class Problem:
    """cuBLASLt's descriptors of one product: compute type, geometry of a, b and the result."""

    def __init__(self, library: Any, compute: str, a: Tensor, b: Tensor) -> None:
        self.compute, self.geometry = compute, geometry(a, b)
        self.operation = c_void_p()
        library.cublasLtMatmulDescCreate(byref(self.operation), COMPUTE_TYPES[compute], CUDA_R_32F)

        def layout(t: Tensor, transpose: int | None = None) -> c_void_p:
            """t^T, or the transpose of that where the library has to transpose it back."""
            op, leading = column_major(t)
            if transpose is not None:
                library.cublasLtMatmulDescSetAttribute(
                    self.operation, transpose, byref(c_int(op)), 4
                )
            rows, columns = reversed(t.shape) if op == OP_N else t.shape
            found = c_void_p()
            library.cublasLtMatrixLayoutCreate(byref(found), CUDA_R_32F, rows, columns, leading)
            return found

        self.b, self.a = layout(b, DESC_TRANSA), layout(a, DESC_TRANSB)
        self.out = layout(a.new_empty(a.shape[0], b.shape[1]))


@dataclass(frozen=True)
class Algorithm:
    """One way of cuBLASLt to compute one product; calling it multiplies."""

    lt: Lt
    problem: Problem
    result: HeuristicResult

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        lt, problem = self.lt, self.problem
        if geometry(a, b) != problem.geometry:
            raise CublasError(f"a product for {problem.geometry} was given {geometry(a, b)}")
        out = a.new_empty(a.shape[0], b.shape[1])
        lt.library.cublasLtMatmul(
            *(lt.handle, problem.operation, byref(lt.one), b.data_ptr(), problem.b),
            *(a.data_ptr(), problem.a, byref(lt.zero), out.data_ptr(), problem.out),
            *(out.data_ptr(), problem.out, byref(self.result.algo)),
            *(lt.workspace.data_ptr(), WORKSPACE_BYTES),
            torch._C._cuda_getCurrentRawStream(lt.device),
        )
        return out


def geometry(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    return a.shape, a.stride(), b.shape, b.stride()
