"""torchtitan 0.3 on the operators: its own MoE block, router, checkpointing and override mechanism.

What is compared is torchtitan with the overrides and without. It casts to BF16 in front of every grouped
GEMM; the fixture ``compute`` also runs with that cast left out, where the two must agree tightly.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._functorch.config

pytest.importorskip("torchtitan", reason="needs torchtitan (pip install torchtitan==0.3.0)")

import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchtitan.components.quantization import float8, mx
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common import config_utils
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module, ModuleDict

from cake_ops.integrations import torchtitan as client
from cake_ops.testing import count_launches

pytestmark = [pytest.mark.client, pytest.mark.filterwarnings("ignore:In CPU autocast")]

DOCS = Path(__file__).resolve().parents[1] / "docs" / "torchtitan.md"
OVERRIDES = [f"{client.__name__}.{name}" for name in ("experts", "router_gate", "selective_ac")]
E, K, D, F = 7, 3, 40, 24  # experts, experts a token, model and hidden width


class Model(Module):
    """A MoE block as the one layer of a model, where torchtitan's checkpointing looks for it.

    The config has what the overrides look for in a Trainer's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        moe: MoE.Config
        activation_checkpoint: SelectiveAC.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = ModuleDict({"moe": config.moe.build()})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers["moe"](x)


def overridden(*overrides: str) -> Model.Config:
    normal, sizes = partial(nn.init.normal_, std=0.3), {"dim": D, "num_experts": E, "top_k": K}
    router = config_utils.make_router_config(
        **sizes, gate_param_init={"weight": normal}, score_func="softmax", route_norm=True
    )
    weights = {name: normal for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    experts = config_utils.make_routed_experts_config(
        **sizes, hidden_dim=F, param_init=weights, comm_backend="standard"
    )
    moe = config_utils.make_moe_config(num_experts=E, router=router, routed_experts=experts)
    config = Model.Config(moe=moe, activation_checkpoint=SelectiveAC.Config())
    lines = apply_overrides(OverrideConfig(imports=list(overrides)), config)
    assert len(lines) == len(overrides)
    return config


def model(*overrides: str) -> Model:
    torch.manual_seed(1)
    built = overridden(*overrides).build()
    built.init_states()
    return built


@pytest.fixture(params=["bf16", "fp32"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The dtype that the experts compute in, as the relative error to allow."""
    if request.param == "fp32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
        return 2e-6
    return 1e-2


@pytest.fixture(autouse=True)
def compiler_state() -> Iterator[None]:
    """torchtitan's checkpointing turns off the order in which Dynamo tries compiled code."""
    torch._dynamo.reset()
    yield
    torch._C._dynamo.eval_frame._set_lru_cache(True)


def error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def step(module: nn.Module, *inputs: Tensor) -> tuple[list[Tensor], Counter[str]]:
    """The result and all gradients, and the launches that they took."""
    inputs = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in inputs)
    module.zero_grad()
    with count_launches() as launches:
        y = module(*inputs)
        y.square().mean().backward()
    leaves = (*(t for t in inputs if t.requires_grad), *module.parameters())
    return [y.detach(), *(leaf.grad for leaf in leaves)], launches


def test_names_layout_and_initialisation_are_torchtitans() -> None:
    stock, ours = model(), model(*OVERRIDES)
    left, right = stock.state_dict(), ours.state_dict()
    assert list(left) == list(right)
    assert list(dict(stock.named_parameters())) == list(dict(ours.named_parameters()))
    for a, b in zip(left.values(), right.values(), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    ours.load_state_dict(left, strict=True)
    stock.load_state_dict(right, strict=True)


def test_training_has_the_same_losses(compute: float) -> None:
    tokens, target = torch.randn(2, 33, D), torch.randn(2, 33, D)

    def losses(*overrides: str) -> Tensor:
        trained = model(*overrides)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        history = []
        for _ in range(12):
            loss = nn.functional.mse_loss(trained(tokens), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        return torch.stack(history)

    with count_launches() as launches:
        ours, stock = losses(*OVERRIDES), losses()
    assert launches["grouped_mm"] == 3 * 12 and launches["router_mm"] == 12
    assert stock[-1] < 0.7 * stock[0]
    torch.testing.assert_close(ours, stock, rtol=compute, atol=0)


def test_fsdp2_with_bf16_parameters_equals_a_bf16_copy() -> None:
    """torchtitan always trains under fully_shard, which hands FP32 parameters over as BF16 ones."""
    x = torch.randn(2, 33, D)
    expected, _ = step(model(*OVERRIDES).bfloat16(), x.bfloat16())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = model(*OVERRIDES)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        (y, dx, *gradients), launches = step(sharded, x)
        actual = [y, dx, *(g.full_tensor() for g in gradients)]
    finally:
        dist.destroy_process_group()
    assert launches["grouped_mm"] == 3 and launches["router_mm"] == 1
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.float(), e.float(), rtol=0, atol=0)


def loop(*, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """The seam of the experts for the FP64 reference."""
    ends = [0, *offs.tolist()]
    return torch.cat([A[i:j] @ b for b, i, j in zip(B_t, ends, ends[1:], strict=False)])


@pytest.mark.parametrize("base", [GroupedExperts, GptOssGroupedExperts])
def test_experts_are_as_exact_as_torchtitans_and_the_tail_is_zero(
    base: type[GroupedExperts], compute: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = base.Config(dim=D, hidden_dim=F, num_experts=E)
    stock, ours = config.build(), client.experts(config).build()
    assert type(ours) is client.experts_class(base) and isinstance(ours, base)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(stock.state_dict())
    x, counts = torch.randn(100, D), torch.tensor([5, 0, 63, 1, 7, 0, 24])  # int64 counts
    theirs, none = step(stock, x, counts)
    padded = torch.cat([x, torch.full((29, D), torch.nan)]).requires_grad_()
    with count_launches() as launches:
        y = ours(padded, counts)
        y[:100].square().mean().backward()
    assert not none and launches["grouped_mm"] == launches["grouped_mm_wgrad"] > 1
    assert y.shape == (129, D) and y.dtype == theirs[0].dtype
    assert not y[100:].any() and not padded.grad[100:].any()
    for name, parameter in ours.named_parameters():
        assert parameter.grad[0].any() and not parameter.grad[1].any(), name

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    stock._grouped_mm = loop
    exact, _ = step(stock.double(), x.double(), counts)
    actual = [y[:100].detach(), padded.grad[:100], *(p.grad for p in ours.parameters())]
    for a, t, e in zip(actual, theirs, exact, strict=True):
        assert error(a, e) < max(1.1 * error(t, e), 1e-6)


def test_experts_compile_to_one_graph_for_any_number_of_rows() -> None:
    experts = model(*OVERRIDES).layers["moe"].routed_experts.inner_experts
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, backend=counter, fullgraph=True)
    for sizes in ([9, 1, 0, 20, 57, 3, 10], [1, 0, 0, 0, 4, 300, 2], [0, 5, 8, 3, 1, 1, 13]):
        x, counts = torch.randn(sum(sizes), D), torch.tensor(sizes)
        actual, launches = step(compiled, x, counts)
        expected, _ = step(experts, x, counts)
        assert launches["grouped_mm"] == 3
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0)
    assert counter.frame_count == 2  # the first number of rows, and any


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_is_fp32_inside_torchtitans_router(dtype: torch.dtype) -> None:
    stock, ours = (model(*names).layers["moe"].router.to(dtype) for names in ((), OVERRIDES))
    gate = ours.gate
    assert isinstance(gate, client.RouterGate) and isinstance(gate, Linear)
    assert isinstance(gate, nn.Linear) and gate.weight.dtype == dtype
    x = torch.randn(2, 257, D, dtype=dtype)
    logits = x.double() @ gate.weight.double().T
    assert gate(x).dtype == torch.float32 and error(gate(x), logits) < 5e-7
    weight, expert, scores = ours(x)
    assert scores.dtype == weight.dtype == torch.float32
    assert error(scores, logits.softmax(-1)) < 1e-6
    assert torch.equal(expert.sort(-1)[0], logits.topk(K)[1].sort(-1)[0])
    if dtype == torch.float32:
        assert torch.equal(stock(x)[1].sort(-1)[0], expert.sort(-1)[0])
    else:  # the autocast that asks for FP32 has no effect on the CPU
        assert stock(x)[2].dtype == dtype and error(stock(x)[2], logits.softmax(-1)) > 1e-3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("policy", "grouped", "router"),
    [(None, 3, 1), ("stock", 6, 2), ("selective_ac", 3, 1), ("full", 6, 2)],
)
def test_launches_under_torchtitans_checkpointing(
    policy: str | None, grouped: int, router: int, compiled: bool
) -> None:
    x = torch.randn(2, 33, D)
    expected, _ = step(model(*OVERRIDES), x)
    checkpointed = model(*OVERRIDES)
    if policy is not None:
        policies = {"stock": SelectiveAC.Config(), "full": FullAC.Config()}
        ours = overridden(*OVERRIDES).activation_checkpoint
        policies.get(policy, ours).build().apply(checkpointed)
    if compiled:  # block by block, as torchtitan does
        checkpointed.layers["moe"].compile(backend="aot_eager", fullgraph=True)
    actual, launches = step(checkpointed, x)
    assert (launches["grouped_mm"], launches["router_mm"]) == (grouped, router)
    assert launches["grouped_mm_dgrad"] == launches["grouped_mm_wgrad"] == 3
    slack = 1e-6 if compiled else 0  # the gradients of x are added in another order
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=slack, atol=slack)


@pytest.mark.parametrize(("budget", "grouped"), [(1.0, 3), (0.0, 6)])
def test_launches_under_torchtitans_memory_budget(budget: float, grouped: int) -> None:
    x, checkpointed = torch.randn(2, 33, D), model(*OVERRIDES)
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # torchtitan's is for good
        MemoryBudgetAC.Config(memory_budget=budget).build().apply(checkpointed)
        checkpointed.layers["moe"].compile(backend="aot_eager", fullgraph=True)
        _, launches = step(checkpointed, x)
    assert launches["grouped_mm"] == grouped == 3 * launches["router_mm"]


def test_a_checkpoint_of_the_experts_alone_stops_before_the_last_gemm() -> None:
    experts = model(*OVERRIDES).layers["moe"].routed_experts.inner_experts
    x, counts = torch.randn(100, D, requires_grad=True), torch.tensor([9, 1, 0, 20, 57, 3, 10])
    with count_launches() as launches:
        checkpoint(experts, x, counts, use_reentrant=False).square().mean().backward()
    assert launches["grouped_mm"] == 5


@pytest.mark.parametrize(
    ("family", "flavor", "moe_layers"),
    [(qwen3, "debugmodel_moe", 8), (deepseek_v3, "debugmodel", 5), (gpt_oss, "debugmodel", 4)],
)
def test_overrides_reach_every_layer_of_torchtitans_models(
    family: ModuleType, flavor: str, moe_layers: int
) -> None:
    spec = family.model_registry(flavor)
    with torch.device("meta"):
        stock = spec.model.build()
    apply_overrides(OverrideConfig(imports=OVERRIDES[:2]), spec)
    with torch.device("meta"):
        ours = spec.model.build()
    ours.verify_module_protocol()
    assert sum(isinstance(m, client.RouterGate) for m in ours.modules()) == moe_layers
    classes = {type(m) for m in stock.modules() if isinstance(m, GroupedExperts)}
    experts = [type(m) for m in ours.modules() if isinstance(m, GroupedExperts)]
    assert set(experts) == {client.experts_class(c) for c in classes} and len(experts) == moe_layers
    shapes = {name: p.shape for name, p in stock.named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == shapes


def test_a_config_changed_by_others_is_refused() -> None:
    for quantise in (float8._get_float8_grouped_experts_cls, mx._get_mxfp8_grouped_experts_cls):
        changed = quantise(GroupedExperts).Config(dim=D, hidden_dim=F, num_experts=E)
        with pytest.raises(RuntimeError, match="8GroupedExperts has grouped GEMMs of its own"):
            client.experts(changed)
    with pytest.raises(RuntimeError, match="router_gate: .* Linear.Config itself, got ScaledBias"):
        client.router_gate(ScaledBiasRowwiseLinear.Config(in_features=D, out_features=E))
    with pytest.raises(RuntimeError, match="selective_ac: .* SelectiveAC.Config itself, got Cake"):
        client.selective_ac(client.CakeSelectiveAC.Config())


def test_import_is_lazy_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = "import cake_ops.integrations, sys; assert 'torchtitan' not in sys.modules"
    subprocess.run([sys.executable, "-c", lazy], check=True)
    monkeypatch.delitem(sys.modules, client.__name__)
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    with pytest.raises(ImportError, match=r"torchtitan 0\.3 .*pip install torchtitan==0\.3\.0"):
        importlib.import_module(client.__name__)


def test_page_names_overrides_that_exist_and_its_snippet_runs(tmp_path: Path) -> None:
    text = DOCS.read_text()
    (command,) = re.findall(r"(?ms)^torchrun .*?^```$", text)
    words = shlex.split(command.replace("\\\n", ""))
    first = words.index("--override.imports") + 1
    assert parse_cli_imports(words[first : first + 3]) == OVERRIDES
    (snippet,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert "assert" in snippet
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    runpy.run_path(str(script), run_name="__main__")
