"""cuBLAS and cuBLASLt through ctypes: layouts of structs and arguments, checked on libraries in Python.

The fake libraries read their arguments as the real ones do: addresses, leading dimensions and transpose
flags of matrices stored by columns. So a wrong order or size of the operands gives a wrong product.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from cake_ops.bench import cublas
from cake_ops.bench.cublas import Algorithm, CublasError, Lt, Problem, Sgemm, column_major
from cake_ops.bench.devices import CudaDevice
from cake_ops.bench.router_cases import PASSES, RouterCase, RouterData, measure_outputs

CPU = torch.device("cpu")
OUTPUTS = dict(zip(PASSES, ("y", "dx", "dw"), strict=True))


@pytest.fixture
def data() -> RouterData:
    return RouterData.random(RouterCase(40, 33, 24), CPU, seed=1)


def columns(address, op: int, rows: int, columns: int, leading: int) -> torch.Tensor:
    """op of the matrix stored by columns at an address; rows and columns are those after op."""
    shape = (rows, columns) if op == cublas.OP_N else (columns, rows)
    assert leading >= shape[0]
    address = address.value if isinstance(address, ctypes.c_void_p) else address
    memory = (ctypes.c_float * (leading * (shape[1] - 1) + shape[0])).from_address(address)
    stored = torch.frombuffer(memory, dtype=torch.float32).as_strided(shape, (1, leading))
    return stored if op == cublas.OP_N else stored.t()


class FakeCublas:
    """cublasSgemm in torch; remembers the stream and the workspace."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name):
        assert name in cublas.SIGNATURES["cublas"]
        return lambda *args: self.calls.append(name)

    def cublasSgemm_v2(self, handle, op_a, op_b, m, n, k, alpha, a, ld_a, b, ld_b, beta, c, ld_c):
        assert len(cublas.SIGNATURES["cublas"]["cublasSgemm_v2"]) == 14
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        product = columns(a, op_a, m, k, ld_a) @ columns(b, op_b, k, n, ld_b)
        columns(c, cublas.OP_N, m, n, ld_c).copy_(product)
        self.calls.append("cublasSgemm_v2")


class FakeCublasLt:
    """Descriptors as entries of a table. The heuristics propose two algorithms for plain FP32."""

    def __init__(self) -> None:
        self.table: list[dict] = [{}]

    def _new(self, out, **fields) -> None:
        self.table.append(fields)
        out._obj.value = len(self.table) - 1

    def _at(self, handle) -> dict:
        return self.table[handle.value]

    def cublasLtCreate(self, handle):
        self._new(handle)

    def cublasLtMatmulDescCreate(self, out, compute, scale):
        assert scale == cublas.CUDA_R_32F
        self._new(out, compute=compute)

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):
        assert size == ctypes.sizeof(value._obj) == 4
        self._at(desc)[attribute] = value._obj.value

    def cublasLtMatrixLayoutCreate(self, out, dtype, rows, columns, leading):
        assert dtype == cublas.CUDA_R_32F
        self._new(out, rows=rows, columns=columns, leading=leading)

    def cublasLtMatmulPreferenceCreate(self, out):
        self._new(out)

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert (attribute, value._obj.value, size) == (1, 32 << 20, 8)
        self._at(preference)["limited"] = True

    def cublasLtMatmulPreferenceDestroy(self, preference):
        self._at(preference).clear()

    def cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, wanted, out, n):
        assert self._at(preference)["limited"] and c is d and wanted == len(out)
        if self._at(desc)["compute"] != 68:
            raise CublasError("cublasLtMatmulAlgoGetHeuristic failed with status 15")
        n._obj.value = 4
        for i in range(4):
            out[i].algo.data[0], out[i].workspace_bytes = 100 + i, 1 << 20
        out[1].state, out[2].workspace_bytes = 15, 64 << 20  # neither can be run

    def cublasLtMatmul(
        self, handle, desc, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, *rest
    ):
        algo, workspace, size, stream = rest
        assert algo._obj.data[0] in (100, 103) and workspace and size == 32 << 20 and stream == 5
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0) and c == d
        op_a, op_b = self._at(desc)[3], self._at(desc)[4]
        a, b = (
            columns(at, 0, table["rows"], table["columns"], table["leading"])
            for at, table in ((a, self._at(layout_a)), (b, self._at(layout_b)))
        )
        out = self._at(layout_d)
        product = (a.t() if op_a else a) @ (b.t() if op_b else b)
        columns(d, 0, out["rows"], out["columns"], out["leading"]).copy_(product)


@pytest.fixture
def fakes(monkeypatch):
    libraries = {"cublas": FakeCublas(), "cublasLt": FakeCublasLt()}
    monkeypatch.setattr(cublas, "open_library", libraries.__getitem__)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    return libraries


def test_structs_have_the_layout_of_the_headers():
    result = cublas.HeuristicResult
    assert ctypes.sizeof(cublas.MatmulAlgo) == 64 and ctypes.sizeof(result) == 96
    offsets = {name: getattr(result, name).offset for name, _ in result._fields_}
    assert offsets == {"algo": 0, "workspace_bytes": 64, "state": 72, "waves": 76, "reserved": 80}


def test_a_library_is_found_where_the_process_has_it():
    maps = (
        "7f00-7f01 r--p 00000000 00:2a 12   /x/a b/lib/libcublasLt.so.13\n"
        "7f02-7f03 r--p 00000000 00:2a 13   /x/lib/libcublas.so.13.1\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    assert cublas.mapped("libcublas", maps) == "/x/lib/libcublas.so.13.1"
    assert cublas.mapped("libcublasLt", maps) == "/x/a b/lib/libcublasLt.so.13"
    assert cublas.mapped("libcufft", maps) is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has cuBLAS")
def test_a_missing_library_is_named():
    with pytest.raises(CublasError, match="libcublasLt is not loaded"):
        cublas.open_library("cublasLt")


def test_a_failing_call_is_named():
    def cublasSgemm_v2():  # what ctypes hands to errcheck has a name, too
        pass

    with pytest.raises(CublasError, match="cublasSgemm_v2 failed with status 13"):
        cublas._check(13, cublasSgemm_v2, ())


def test_a_matrix_needs_a_unit_stride():
    t = torch.zeros(8, 6)
    assert column_major(t) == (cublas.OP_N, 6) and column_major(t.t()) == (cublas.OP_T, 6)
    assert column_major(t[:, :4]) == (cublas.OP_N, 6)
    with pytest.raises(CublasError, match=r"unit stride, got strides \(12, 2\)"):
        column_major(t[::2, ::2])


@pytest.mark.parametrize("name", PASSES)
def test_sgemm_multiplies_every_pass(name, data, fakes):
    sgemm = Sgemm(CPU)
    for _ in range(2):
        measure_outputs(data, {OUTPUTS[name]: sgemm(*data.operands(name))}, 2e-6)
    once = ["cublasCreate_v2", "cublasSetMathMode", "cublasSetStream_v2", "cublasSetWorkspace_v2"]
    assert fakes["cublas"].calls == [*once, "cublasSgemm_v2", "cublasSgemm_v2"]


def test_sgemm_follows_the_stream(data, fakes, monkeypatch):
    sgemm = Sgemm(CPU)
    sgemm(*data.operands("fwd"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 6)
    fakes["cublas"].calls.clear()
    sgemm(*data.operands("fwd"))
    assert fakes["cublas"].calls == [
        "cublasSetStream_v2",
        "cublasSetWorkspace_v2",  # which a new stream made the handle forget
        "cublasSgemm_v2",
    ]


@pytest.mark.parametrize("name", PASSES)
def test_every_proposal_multiplies_every_pass(name, data, fakes):
    algorithms = Lt(CPU).algorithms(*data.operands(name))
    assert [algorithm.result.algo.data[0] for algorithm in algorithms] == [100, 103]
    for algorithm in algorithms:
        assert algorithm.problem.compute == "FP32"
        measure_outputs(data, {OUTPUTS[name]: algorithm(*data.operands(name))}, 2e-6)
    with pytest.raises(CublasError, match="a product for"):
        algorithms[0](data.x, data.x.t())


# ---- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", PASSES)
def test_the_libraries_multiply_on_the_gpu(name):
    device = CudaDevice()
    data = RouterData.random(RouterCase(1024, 100, 72), device.torch_device, seed=2)
    a, b = data.operands(name)
    sgemm, lt = Sgemm(device.torch_device), Lt(device.torch_device)
    algorithms = lt.algorithms(a, b)
    assert algorithms and all(isinstance(x, Algorithm) for x in algorithms)
    assert isinstance(algorithms[0].problem, Problem)
    for product in (sgemm, algorithms[0]):
        measure_outputs(data, {OUTPUTS[name]: product(a, b)}, 2e-6)
        replay, outputs = device.capture(lambda product=product: {OUTPUTS[name]: product(a, b)})
        outputs[OUTPUTS[name]].fill_(float("nan"))
        replay()
        measure_outputs(data, outputs, 2e-6)
