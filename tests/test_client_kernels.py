"""Hugging Face kernels on cake_ops: the local repository loads, and kernelized modules compute the same."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

kernels = pytest.importorskip("kernels", reason="needs the client: kernels")
from kernels import Mode, kernelize, use_kernel_mapping

from cake_ops.integrations.kernels import REPOSITORY, mapping
from cake_ops.testing import count_launches

pytestmark = pytest.mark.client
MODE = Mode.TRAINING | Mode.TORCH_COMPILE


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@kernels.use_kernel_forward_from_hub("CakeGroupedLinear")
class Loop(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7, 5))
        self.bias = nn.Parameter(torch.randn(4, 7)) if bias else None

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        parts, begin = [], 0
        for e, end in enumerate(offs.tolist()):
            y = x[begin:end] @ self.weight[e].t()
            parts.append(y if self.bias is None else y + self.bias[e])
            begin = end
        return torch.cat([*parts, x.new_zeros(len(x) - begin, 7)])


def step(module: nn.Module, run: nn.Module, *args: Tensor) -> list[Tensor]:
    module.zero_grad()
    y = run(*args)
    y.pow(2).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["torch-cpu", "torch-cuda"])
def test_each_variant_holds_the_layers(variant: str) -> None:
    module = kernels.get_local_kernel(REPOSITORY / variant)
    assert all(hasattr(module.layers, name.removeprefix("Cake")) for name in mapping())
    (loaded,) = (k for k in kernels.get_loaded_kernels() if k.module is module)
    assert variant == f"torch-{loaded.metadata.backend.backend_type}"


@pytest.mark.parametrize("bias", [False, True])
def test_kernelized_linear(bias: bool) -> None:
    module, products = Loop(bias), 2 if bias else 1
    args = torch.randn(12, 5), torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    want = step(module, module, *args)
    with use_kernel_mapping(mapping()):
        kernelize(module, mode=MODE, device="cpu")
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        with count_launches() as launches:
            assert_close(step(module, run, *args), want)
        assert launches["grouped_mm"] == launches["grouped_mm_wgrad"] == products
    kernelize(module, mode=MODE, device="cpu")  # without the mapping
    with count_launches() as launches:
        assert_close(step(module, module, *args), want)
    assert not launches


@pytest.fixture
def marked() -> Iterator[None]:
    """transformers' experts, marked from outside."""
    pytest.importorskip("transformers", reason="needs the client: transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    kernels.replace_kernel_forward_from_hub(Qwen3MoeExperts, "CakeExperts")
    yield
    del Qwen3MoeExperts.kernel_layer_name, Qwen3MoeExperts.kernel_condition


def test_kernelized_experts_of_transformers(marked: None) -> None:
    from cake_ops.bench.layer_data import Layer

    block = Layer("small", "qwen3_moe", 32, 24, 6, 2).block("eager")
    for p in block.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    x = torch.randn(2, 11, 32)
    want = step(block, block, x)
    with use_kernel_mapping(mapping()):
        kernelize(block, mode=MODE, device="cpu")
    with count_launches() as launches:
        assert_close(step(block, block, x), want)
    assert launches["grouped_mm"] == launches["grouped_mm_wgrad"] == 2


def test_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs/huggingface-kernels.md").read_text()
    (source,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert "assert" in source
    (tmp_path / "snippet.py").write_text(source)
    runpy.run_path(str(tmp_path / "snippet.py"))
