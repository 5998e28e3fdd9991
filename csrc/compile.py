"""Turns the instances of ``instances.cmake`` into cubins and a manifest; CMake calls it by steps.

``nvcc`` prints the compiler to use. ``cubin`` compiles one instance and keeps what ptxas says of it
in a report. ``manifest`` joins the reports into the ``manifest.json`` installed with the cubins.

A kernel that spills, or whose wgmma or setmaxnreg ptxas had to weaken, still computes the right
result, only slower, and nothing later would notice. So such an instance fails the build here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FLAGS = ("-cubin", "-O3", "-std=c++17", "-Xptxas", "-v")

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
PROPERTIES = re.compile(
    r"Function properties for (\S+)\s+"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# Such as wgmma serialized or its accumulators on the stack, and a setmaxnreg without effect.
WEAKENED = re.compile(r".*Potential Performance Loss.*")

NOT_FOUND = """\
no nvcc found. Looked at -DCAKE_NVCC and $CAKE_NVCC (not set), the package nvidia-cuda-nvcc of
{python} (not installed), PATH (no nvcc) and $CUDA_HOME ({cuda_home}).
Install without --no-build-isolation, so that the compiler comes from the build requirements of
pyproject.toml, or name one of CUDA 13: CAKE_NVCC=/usr/local/cuda/bin/nvcc pip install ."""


class BuildError(Exception):
    """What is wrong with the compiler or with an instance, in words for the person who builds."""


def find_nvcc(hint: str = "") -> str:
    """Returns the nvcc to use: ``hint``, $CAKE_NVCC, the wheel's, the one on PATH, $CUDA_HOME's.

    The wheel comes before PATH: in an isolated build it is the pinned version that was tested.

    Args:
        hint: a path or a name on PATH (the CMake variable ``CAKE_NVCC``), or empty.

    Raises:
        BuildError: a compiler was named and is not there, or none was found at all.
    """
    for origin, named in (("-DCAKE_NVCC", hint), ("CAKE_NVCC", os.environ.get("CAKE_NVCC", ""))):
        if named:
            path = shutil.which(named)
            if path is None:
                raise BuildError(f"{origin}={named} is not an executable")
            return path
    # A namespace package: torch's wheels add folders without a compiler to it.
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")
    wheels = [f"{folder}/bin" for folder in (spec and spec.submodule_search_locations) or ()]
    cuda_home = os.environ.get("CUDA_HOME", "")
    for folders in (*wheels, os.environ.get("PATH", ""), cuda_home and f"{cuda_home}/bin"):
        path = shutil.which("nvcc", path=folders) if folders else None
        if path is not None:
            return path
    raise BuildError(NOT_FOUND.format(python=sys.executable, cuda_home=cuda_home or "not set"))


def nvcc_version(nvcc: str) -> str:
    """Returns the release of ``nvcc``, such as ``13.0.88``."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if found is None:
        raise BuildError(f"{nvcc} --version prints no release:\n{text}")
    return found[1]


def parse_ptxas(log: str, symbol: str) -> dict[str, Any]:
    """Returns what ``ptxas -v`` says of the one kernel of an instance.

    Args:
        log: what nvcc printed with ``-Xptxas -v``.
        symbol: the name that the kernel must have.

    Raises:
        BuildError: another kernel, or one that spills (itself or a function it calls), or one that
            ptxas had to weaken.
    """
    entries = ENTRY.findall(log)
    if [name for name, _ in entries] != [symbol]:
        raise BuildError(f"expected the one kernel {symbol}, ptxas reported {entries}")
    functions = {name: list(map(int, sizes)) for name, *sizes in PROPERTIES.findall(log)}
    used = USED.search(log)
    if used is None or symbol not in functions:
        raise BuildError(f"cannot read what ptxas reported:\n{log}")
    registers, smem = int(used[1]), int(used[2] or 0)
    stores, loads = (sum(sizes[i] for sizes in functions.values()) for i in (1, 2))
    if stores or loads:
        raise BuildError(f"spills {stores} bytes, loads {loads} back, at {registers} registers")
    weakened = WEAKENED.search(log)
    if weakened:
        raise BuildError(weakened[0].strip())
    return {
        "symbol": symbol,
        "arch": entries[0][1],
        "registers": registers,
        "stack_bytes": functions[symbol][0],
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "static_smem_bytes": smem,
    }


def compile_cubin(args: argparse.Namespace) -> None:
    """Compiles one instance and writes its report, or leaves neither behind."""
    stem = f"{args.source.stem}_{args.config}"
    cubin, report, depfile = (args.output / f"{stem}{end}" for end in (".cubin", ".json", ".d"))
    command = [args.nvcc, f"-gencode=arch=compute_{args.arch},code=sm_{args.arch}", *FLAGS]
    command += [f"-I{args.include}", f"-DCAKE_CONFIG={args.config}", "-MD", "-MF", str(depfile)]
    command += ["-o", str(cubin), str(args.source)]
    report.unlink(missing_ok=True)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    log = done.stdout + done.stderr
    try:
        if done.returncode:
            raise BuildError(f"nvcc failed with status {done.returncode}\n{log}")
        about = {"file": cubin.name, "source": args.source.name, "config": args.config}
        report.write_text(json.dumps(about | parse_ptxas(log, stem)))
    except BuildError as error:
        cubin.unlink(missing_ok=True)
        raise BuildError(f"{stem}: {error}\n{shlex.join(command)}") from None


def write_manifest(args: argparse.Namespace) -> None:
    """Joins the reports into one table, keyed by symbol."""
    reports = [json.loads(path.read_text()) for path in args.reports]
    kernels = {report["symbol"]: report for report in reports}
    manifest = {"nvcc": nvcc_version(args.nvcc), "kernels": kernels}
    args.output.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Runs one step; an error goes to stderr in words, without a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("nvcc", help="print the compiler to use")
    step.add_argument("hint", nargs="?", default="")
    step.set_defaults(run=lambda args: print(find_nvcc(args.hint), end=""))
    step = steps.add_parser("cubin", help="compile one instance")
    step.add_argument("--nvcc", required=True)
    step.add_argument("--arch", required=True, help="such as 90a")
    step.add_argument("--include", type=Path, required=True)
    step.add_argument("--source", type=Path, required=True)
    step.add_argument("--config", required=True, help="the value of the macro CAKE_CONFIG")
    step.add_argument("--output", type=Path, required=True, help="a folder")
    step.set_defaults(run=compile_cubin)
    step = steps.add_parser("manifest", help="join the reports")
    step.add_argument("--nvcc", required=True)
    step.add_argument("--output", type=Path, required=True)
    step.add_argument("reports", type=Path, nargs="+")
    step.set_defaults(run=write_manifest)
    args = parser.parse_args()
    try:
        args.run(args)
    except BuildError as error:
        sys.exit(f"cake_ops: {error}")


if __name__ == "__main__":
    main()
