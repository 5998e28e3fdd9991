"""The logger ``cake_ops`` and CAKE_LOG: one line for each new geometry, none for a repeated call."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import cake_ops
from cake_ops import _log, _serve

BF16 = torch.bfloat16
HOW = "torch: one FP32 product for each group"

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Returns the lines written since the last look; the level is set as a program would set it."""

    def look() -> list[str]:
        assert all(r.name == "cake_ops" and r.levelno == logging.DEBUG for r in caplog.records)
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    cake_ops.clear_caches()
    with caplog.at_level(logging.DEBUG, logger="cake_ops"):
        yield look
    cake_ops.clear_caches()


def operands(rows: int = 300, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(rows, 64).to(dtype), torch.randn(2, 128, 64).to(dtype)
    return x, w, torch.tensor([100, rows], dtype=torch.int32)


def test_a_line_names_operator_operands_result_and_what_serves_it(lines: Lines) -> None:
    x, w, offs = operands()
    cake_ops.grouped_mm(x.requires_grad_(), w.requires_grad_(), offs).backward(
        torch.ones(300, 128, dtype=BF16)
    )
    x, w, g = "bfloat16[300, 64]", "bfloat16[2, 128, 64]", "bfloat16[300, 128]"
    assert lines() == [
        f"grouped_mm({x}, {w}, int32[2]) -> {g}: {HOW}",
        f"grouped_mm_dgrad({g}, {w}, int32[2]) -> {x}: {HOW}",
        f"grouped_mm_wgrad({g}, {x}, int32[2]) -> {w}: {HOW}",
    ]


def test_a_known_geometry_writes_nothing(lines: Lines) -> None:
    for rows in (300, 300, 301, 511, 256):  # the number of rows counts as a power of two
        cake_ops.grouped_mm(*operands(rows))
    assert len(lines()) == 1
    with torch.no_grad():
        cake_ops.router_mm(torch.randn(7, 16), torch.randn(4, 16))
        cake_ops.router_mm(torch.randn(5, 16), torch.randn(4, 16))
    assert len(lines()) == 1


def test_what_is_new(lines: Lines) -> None:
    x, w, offs = operands()
    cake_ops.grouped_mm(x, w, offs)
    assert len(lines()) == 1
    cake_ops.grouped_mm(torch.randn(600, 64).to(BF16), w, offs)
    assert lines() == [
        f"grouped_mm(bfloat16[600, 64], bfloat16[2, 128, 64], int32[2]) -> bfloat16[600, 128]: {HOW}"
    ]
    cake_ops.grouped_mm(*operands(dtype=torch.float32))
    assert "float32[300, 64]" in lines()[0]
    cake_ops.grouped_mm(x, w.mT.contiguous().mT, offs)
    assert "bfloat16[2, 128, 64] strides [8192, 1, 128]" in lines()[0]
    cake_ops.grouped_mm(x, w[:, :64], offs)
    assert "-> bfloat16[300, 64]" in lines()[0]
    cake_ops.grouped_mm(x, w, offs, out=x.new_empty(300, 128))
    assert lines()[0].startswith("grouped_mm_out(")
    for out_dtype in (None, torch.float32):
        cake_ops.grouped_mm_wgrad(x, x, offs, out_dtype=out_dtype)
        assert ("-> float32[2, 64, 64]" in lines()[0]) == (out_dtype is not None)
    cake_ops.grouped_mm_wgrad_(torch.zeros(2, 64, 64), x, x, offs)
    assert lines()[0].startswith(
        "grouped_mm_wgrad_(bfloat16[300, 64], bfloat16[300, 64], int32[2]) "
    )
    cake_ops.prepare("dense_mm", x, w[0]).launch()
    assert lines() == [
        "dense_mm(bfloat16[300, 64], bfloat16[128, 64]) -> bfloat16[300, 128]: torch: one FP32 product"
    ]
    cake_ops.clear_caches()
    cake_ops.grouped_mm(x, w, offs)
    assert len(lines()) == 1


def test_a_refused_call_writes_nothing(lines: Lines) -> None:
    x, w, offs = operands()
    with pytest.raises(RuntimeError):
        cake_ops.grouped_mm(x, w, offs.long())
    assert lines() == []


def test_known_geometries_are_bounded(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log, "MAX_KNOWN", 4)
    for n in range(1, 10):
        cake_ops.dense_mm(torch.randn(3, 4), torch.randn(n, 4))
        assert len(_log._known) <= 4
    assert len(lines()) == 9


def test_off_by_default_and_then_nothing_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*call: object) -> None:
        raise AssertionError("described a call although the logger is off")

    monkeypatch.setattr(_serve, "log_torch", forbidden)
    monkeypatch.setattr(_log, "describe", forbidden)
    cake_ops.clear_caches()
    cake_ops.grouped_mm(*operands())
    assert caplog.records == []


# CAKE_LOG, which is read when the package is imported

PROGRAM = """
import logging, torch
logging.basicConfig(level=logging.DEBUG)
import cake_ops
for _ in range(3):
    cake_ops.dense_mm(torch.ones(2, 3), torch.ones(4, 3))
"""


def run(cake_log: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "CAKE_LOG": cake_log},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_cake_log_prints_each_line_once_beside_a_root_logger() -> None:
    done = run("debug")
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "cake_ops" in line]
    assert ours == [
        "cake_ops: dense_mm(float32[2, 3], float32[4, 3]) -> float32[2, 4]: torch: one FP32 product"
    ]


def test_cake_log_refuses_other_values() -> None:
    done = run("verbose")
    assert done.returncode != 0
    assert (
        "RuntimeError: cake_ops: CAKE_LOG must be debug, or not set, got 'verbose'" in done.stderr
    )
