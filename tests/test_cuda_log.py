"""The lines of the logger ``cake_ops`` for routes of the CUDA backend, on emulated kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import reference
import torch
from forms import select
from router_emulator import emulated_router
from test_cuda_routes import PRODUCTS, emulated, make  # noqa: F401  (a fixture, for every test here)

import cake_ops
from cake_ops._log import describe

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
        "grouped_mm(bfloat16[300, 60], bfloat16[2, 128, 60], int32[2]): kernel after a copy:"
        " K = 60 is no multiple of 8"
    )
    assert inner.startswith(
        "after the copy: grouped_mm_out(bfloat16[300, 64], bfloat16[2, 128, 64], int32[2])"
        " -> bfloat16[300, 128]: kernel sm90_grouped_gemm_nt_"
    )


def test_options_and_written_tensors_are_named(caplog: pytest.LogCaptureFixture) -> None:
    x, g = torch.randn(300, 64).to(BF16), torch.randn(300, 128).to(BF16)
    cake_ops.grouped_mm_wgrad(g, x, OFFS, out_dtype=torch.float32)
    cake_ops.grouped_mm_wgrad_(torch.zeros(2, 128, 64), g, x, OFFS)
    cake_ops.grouped_mm(torch.empty(0, 64, dtype=BF16), torch.randn(2, 128, 64).to(BF16), OFFS)
    plain, added, nothing = caplog.messages
    call, result = "bfloat16[300, 128], bfloat16[300, 64], int32[2]", "float32[2, 128, 64]"
    assert plain.startswith(f"grouped_mm_wgrad({call}, torch.float32): kernel sm90_")
    assert added.startswith(f"grouped_mm_wgrad_({call}) -> {result}: kernel sm90_")
    assert nothing.endswith(": no kernel: the result is empty")


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_writing_form_is_named_as_the_operator_that_is_called(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whether the kernel runs on its operands or on copies of them, of which a second line tells."""
    for k in (64, 60):
        x, w, g, offs = make([100, 200], n=128, k=k)
        call = select(name, x, w, g, offs)
        out = torch.zeros(reference.PRODUCTS[name](*call).shape, dtype=BF16)
        forms = {f"{name}_out": lambda call, out: getattr(cake_ops, name)(*call, out=out)}
        if name == "grouped_mm_wgrad":
            forms["grouped_mm_wgrad_"] = lambda call, out: cake_ops.grouped_mm_wgrad_(out, *call)
        for form, run in forms.items():
            caplog.clear()
            for _ in range(2):
                run(call, out)
            first, *inner = caplog.messages
            assert first.startswith(f"{form}({describe(*call)}) -> {describe(out)}: kernel ")
            assert len(inner) == (k == 60)
            assert all(line.startswith("after the copy: grouped_mm_") for line in inner)


def test_the_router_names_its_writing_forms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    g, x = torch.randn(300, 8), torch.randn(300, 63)
    with emulated_router(monkeypatch, str(tmp_path)):
        cake_ops.router_mm_wgrad_(torch.zeros(8, 64), g, torch.randn(300, 64))
        cake_ops.router_mm_wgrad(g, x, out=torch.zeros(8, 63))
    added, written, inner = caplog.messages
    assert added.startswith(
        "router_mm_wgrad_(float32[300, 8], float32[300, 64]) -> float32[8, 64]: "
    )
    call = "router_mm_wgrad_out(float32[300, 8], float32[300, 63]"
    assert (
        written
        == f"{call}) -> float32[8, 63]: kernel after a copy: x: no unit stride or no 16-byte rows"
    )
    assert inner.startswith(
        f"after the copy: {call} strides [64, 1]) -> float32[8, 63]: kernel sm90_"
    )
