"""The lines of the logger ``cake_ops`` for routes of the CUDA backend, on emulated kernels."""

from __future__ import annotations

import logging

import pytest
import torch
from test_cuda_routes import emulated  # noqa: F401  (the fixture, for every test here)

import cake_ops

BF16 = torch.bfloat16
OFFS = torch.tensor([100, 300], dtype=torch.int32)


@pytest.fixture(autouse=True)
def debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="cake_ops")


def operands(k: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(300, k).to(BF16), torch.randn(2, 128, k).to(BF16), OFFS


def test_a_new_route_is_logged_once_with_its_kernel(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        cake_ops.grouped_mm(*operands())
    explanation = cake_ops.explain("grouped_mm", *operands())
    assert explanation.kernel and explanation.tile
    assert caplog.messages == [
        f"grouped_mm(bfloat16[300, 64], bfloat16[2, 128, 64], int32[2]): {explanation}"
    ]


def test_a_copied_call_says_why_and_which_kernel_runs_after_the_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        cake_ops.grouped_mm(*operands(k=60))
    copied, inner = caplog.messages
    assert copied == (
        "grouped_mm(bfloat16[300, 60], bfloat16[2, 128, 60], int32[2]): kernel after a copy: N = 128 or"
        " K = 60 is no multiple of 8"
    )
    assert inner.startswith("into(rows_route, bfloat16[300, 128], bfloat16[300, 64], ")
    assert "kernel sm90_grouped_gemm_nt_" in inner


def test_options_and_written_tensors_are_named(caplog: pytest.LogCaptureFixture) -> None:
    x, g = torch.randn(300, 64).to(BF16), torch.randn(300, 128).to(BF16)
    cake_ops.grouped_mm_wgrad(g, x, OFFS, out_dtype=torch.float32)
    cake_ops.grouped_mm_wgrad_(torch.zeros(2, 128, 64), g, x, OFFS)
    cake_ops.grouped_mm(torch.empty(0, 64, dtype=BF16), torch.randn(2, 128, 64).to(BF16), OFFS)
    plain, added, nothing = caplog.messages
    call = "bfloat16[300, 128], bfloat16[300, 64], int32[2]"
    assert plain.startswith(f"grouped_mm_wgrad({call}, torch.float32): kernel sm90_")
    assert added.startswith(f"into(columns_add_route, float32[2, 128, 64], {call}): kernel sm90_")
    assert nothing.endswith(": no kernel: the result is empty")
