"""The package as it is installed: kernels, version, import and reload; and the build script.

Holds for an editable install, for ``pip install .`` and for a wheel. The kernels are found through
``importlib.resources`` alone: in an editable install they lie in site-packages, the modules in the
source tree. After a *non*-editable install run ``pytest`` there, not ``python -m pytest``, which
puts the current folder first, whose ``cake_ops`` has neither kernels nor ``meta``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cake_ops

ROOT = Path(__file__).resolve().parents[1]
KERNELS = importlib.resources.files("cake_ops") / "kernels"
IMPORT_BUDGET_S = 0.5  # beyond torch's own import; measured 0.03 s on two cores


def load_manifest() -> dict[str, Any]:
    return json.loads((KERNELS / "manifest.json").read_text())


def load_build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "csrc/compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(script: str, *args: str) -> str:
    """Runs ``script`` in a fresh interpreter that does not see the current folder."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(script), *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def elf_sections(image: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, _, _, _, offset, length in headers:
        end = image.index(b"\0", names + name)
        sections[image[names + name : end].decode()] = image[offset : offset + length]
    return sections


def max_threads(info: bytes) -> int:
    """What __launch_bounds__ says: EIATTR_MAX_THREADS of a section .nv.info.<symbol>."""
    sized, max_threads_attribute = 4, 5
    at = 0
    while at < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == sized:
            if attribute == max_threads_attribute:
                x, y, z = struct.unpack_from("<III", info, at)
                return x * y * z
            at += length
    raise AssertionError("the kernel has no __launch_bounds__")


# The installed kernels


def test_manifest_lists_every_instance() -> None:
    table = re.sub(r"#.*", "", (ROOT / "csrc/instances.cmake").read_text())
    instances = {
        (f"{name}.cu", config)
        for call in re.findall(r"cake_kernel\(([^)]+)\)", table)
        for name, *configs in [call.split()]
        for config in configs
    }
    assert instances
    kernels = load_manifest()["kernels"]
    assert {(kernel["source"], kernel["config"]) for kernel in kernels.values()} == instances
    installed = {entry.name for entry in KERNELS.iterdir()}
    assert installed == {f"{symbol}.cubin" for symbol in kernels} | {"manifest.json"}


@pytest.mark.parametrize("symbol", sorted(load_manifest()["kernels"]))
def test_cubin_holds_what_the_manifest_says(symbol: str) -> None:
    kernel = load_manifest()["kernels"][symbol]
    image = (KERNELS / kernel["file"]).read_bytes()
    assert image[:4] == b"\x7fELF"
    (flags,) = struct.unpack_from("<I", image, 0x30)
    assert f"sm_{flags >> 8 & 0xFF}a" == kernel["arch"] == "sm_90a"
    sections = elf_sections(image)
    assert f".text.{symbol}" in sections

    assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    threads = max_threads(sections[f".nv.info.{symbol}"])
    # An SM has 65536 registers, given to a thread in eights: 168 for each of 384 threads. The kernels deal all of
    # them out anew by setmaxnreg, which would wait for any that are missing.
    assert kernel["registers"] == 65536 // threads // 8 * 8, f"{threads} threads"


# The build script


PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compile time = 12.753 ms
"""
GOOD = PTXAS_LOG.format(stack=8, stores=0, loads=0)
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
    " serialized due to insufficient register resources for the wgmma pipeline\n"
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine"
    " register count at entry.\n"
)
CALLEE_SPILLS = (
    "ptxas info    : Function properties for callee\n"
    "    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
)


def test_ptxas_log_is_read() -> None:
    assert load_build_script().parse_ptxas(GOOD, "kernel") == {
        "symbol": "kernel",
        "arch": "sm_90a",
        "registers": 168,
        "stack_bytes": 8,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "static_smem_bytes": 1024,
    }


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (PTXAS_LOG.format(stack=64, stores=24, loads=32), "spills 24 bytes, loads 32 back"),
        (GOOD + CALLEE_SPILLS, "spills 12 bytes, loads 16 back"),
        (SERIALIZED + GOOD, "wgmma.* are serialized"),
        (IGNORED + GOOD, "'setmaxnreg' ignored"),
        (GOOD.replace("kernel", "other"), "expected the one kernel kernel, .*'other'"),
        (GOOD + GOOD.replace("kernel", "second"), "expected the one kernel kernel, .*'second'"),
        ("", "expected the one kernel"),
    ],
    ids=["spill", "callee_spill", "serialized", "setmaxnreg", "misnamed", "second", "empty"],
)
def test_weak_kernel_fails_the_build(log: str, message: str) -> None:
    script = load_build_script()
    with pytest.raises(script.BuildError, match=message):
        script.parse_ptxas(log, "kernel")


def make_nvcc(folder: Path) -> str:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_nvcc_is_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_nvcc = load_build_script().find_nvcc
    hinted, from_env, on_path = (make_nvcc(tmp_path / name) for name in ("hint", "env", "path"))
    wheel = make_nvcc(tmp_path / "site" / "nvidia" / "cu13" / "bin")
    home = make_nvcc(tmp_path / "cuda" / "bin")
    other = tmp_path / "other_wheel"  # torch's wheels: the same namespace, no compiler
    (other / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(other), str(tmp_path / "site")])
    monkeypatch.setenv("CAKE_NVCC", from_env)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    assert find_nvcc(hinted) == hinted
    assert find_nvcc() == from_env
    monkeypatch.delenv("CAKE_NVCC")
    assert find_nvcc() == wheel
    Path(wheel).unlink()
    assert find_nvcc() == on_path
    monkeypatch.setenv("PATH", "")
    assert find_nvcc() == home


def test_missing_nvcc_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_build_script()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CAKE_NVCC", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(script.BuildError, match=r"(?s)no nvcc found.*without --no-build-isolation"):
        script.find_nvcc()
    with pytest.raises(script.BuildError, match="-DCAKE_NVCC=/nowhere/nvcc is not an executable"):
        script.find_nvcc("/nowhere/nvcc")


# What is installed beside the kernels


def test_type_checkers_are_told_of_the_hints() -> None:
    assert (importlib.resources.files("cake_ops") / "py.typed").is_file()


def test_a_wheel_leaves_the_measurements_out() -> None:
    distribution = importlib.metadata.distribution("cake_ops")
    if "_editable_" in str(distribution.files):
        pytest.skip("an editable install uses the source tree, which has them")
    files = {str(file) for file in distribution.files}
    assert files >= {"cake_ops/py.typed", "cake_ops/meta/__init__.py", "cake_ops/bench/records.py"}
    assert not [file for file in files if "bench/results" in file]


# The metadata


def test_version_has_one_source() -> None:
    assert cake_ops.__version__ == importlib.metadata.version("cake_ops")


def test_formatter_pins_agree() -> None:
    pin = r"\b((?:ruff|clang-format)==[\d.]+)"
    project = re.findall(pin, (ROOT / "pyproject.toml").read_text())
    hooks = re.findall(pin, (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(project) == 2
    assert set(hooks) == set(project)


# Import


def test_import_stays_within_budget(record_property: Any) -> None:
    script = """
        import sys, time, torch
        before, start = set(sys.modules), time.perf_counter()
        import cake_ops
        print(time.perf_counter() - start, *sorted(set(sys.modules) - before))
    """
    runs = [run_python(script).split() for _ in range(3)]
    seconds = min(float(run[0]) for run in runs)
    record_property("import_seconds", seconds)
    assert seconds < IMPORT_BUDGET_S
    assert "cake_ops.nn" in runs[0]
    heavy = (
        "cuda.bindings",
        "cuda.core",
        "matplotlib",
        "torch._inductor",
        "torch.distributed.tensor",
        "transformers",
    )  # triton comes with torch.utils.flop_counter, where it is installed
    assert [name for name in runs[0][1:] if name.startswith(heavy)] == []


FORK = """
    import os, sys, torch, cake_ops
    device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    assert not torch.cuda.is_initialized(), "import started CUDA"
    child = os.fork()
    if child == 0:
        x, w = (torch.ones(s, dtype=dtype, device=device) for s in [(5, 8), (2, 16, 8)])
        offs = torch.tensor([1, 4], dtype=torch.int32, device=device)
        y = cake_ops.grouped_mm(x, w, offs).float().cpu()
        os._exit(0 if y[:4].eq(8).all() and y[4:].eq(0).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the forked child failed"
    assert not torch.cuda.is_initialized()
"""


def test_h60_import_does_not_start_cuda() -> None:
    run_python(FORK, "cpu", "float32")


@pytest.mark.gpu
def test_h60_forked_child_uses_cuda() -> None:
    run_python(FORK, "cuda", "bfloat16")


WORKS = """
    import torch
    def works(package):
        x, w = torch.ones(5, 8), torch.ones(2, 3, 8, requires_grad=True)
        y = package.grouped_mm(x, w, torch.tensor([1, 4], dtype=torch.int32))
        y.sum().backward()
        return bool(y[:4].eq(8).all() and y[4:].eq(0).all() and w.grad[1].eq(3).all())
"""


def test_h64_reload_is_harmless() -> None:
    run_python(
        WORKS
        + """
    import importlib, cake_ops
    schema = str(torch.ops.cake.grouped_mm.default._schema)
    importlib.reload(cake_ops)
    assert works(cake_ops)
    assert str(torch.ops.cake.grouped_mm.default._schema) == schema
    """
    )


def test_h64_second_copy_is_refused_and_the_first_stays_whole(tmp_path: Path) -> None:
    run_python(
        WORKS
        + """
    import importlib.util, pathlib, shutil, sys, cake_ops, cake_ops.meta
    copy = pathlib.Path(sys.argv[1]) / "vendored_cake_ops"
    shutil.copytree(pathlib.Path(cake_ops.__file__).parent, copy)
    shutil.copytree(pathlib.Path(cake_ops.meta.__file__).parent, copy / "meta", dirs_exist_ok=True)
    sys.path.insert(0, sys.argv[1])
    for attempt in range(2):
        try:
            import vendored_cake_ops
        except ImportError as error:
            assert "already registered" in str(error) and str(copy) in str(error), error
        else:
            raise AssertionError("two copies serve one namespace")
        assert works(cake_ops)
    """,
        str(tmp_path),
    )


def test_source_tree_that_is_not_installed_says_so(tmp_path: Path) -> None:
    shutil.copytree(Path(cake_ops.__file__).parent, tmp_path / "cake_ops")
    shutil.rmtree(tmp_path / "cake_ops/meta", ignore_errors=True)  # a plain install has it inside
    run_python(
        """
        import importlib.machinery, sys, torch
        sys.meta_path[:] = [importlib.machinery.PathFinder]  # without the editable install's finder
        sys.path.insert(0, sys.argv[1])
        try:
            import cake_ops
        except ImportError as error:
            assert "pip install -e ." in str(error) and sys.argv[1] in str(error), error
        else:
            raise AssertionError("half a package was imported")
        """,
        str(tmp_path),
    )
