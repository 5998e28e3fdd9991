"""transformers on cake_ops: whole tiny models against their eager experts, experts against FP64, routers.

Parameters are drawn anew, since transformers initialises biases with zeros and everything else so small that
a wrong product would hardly show.
"""

from __future__ import annotations

import copy
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

transformers = pytest.importorskip("transformers", reason="needs the client: transformers")
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import cake_ops
import cake_ops.integrations.transformers as cake
from cake_ops.testing import count_launches

pytestmark = pytest.mark.client

COMMON = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "eos_token_id": 2}
COMMON |= {"num_experts_per_tok": 2, "max_position_embeddings": 64}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8}
MLA |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 6, "moe_intermediate_size": 23}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6}),
    "deepseek_v3": ("DeepseekV3Config", {"moe_intermediate_size": 24} | MLA | GROUPS),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 6, "sliding_window": 16}),
}
# Forward products of a step, again with a checkpoint around each layer, again without early stop. gpt-oss
# has two more for its biases; DeepSeek-V3 has one sparse layer, whose shared experts save after the experts.
LAUNCHES = {"qwen3_moe": (4, 6, 8), "mixtral": (4, 6, 8)}
LAUNCHES |= {"deepseek_v3": (2, 4, 4), "gpt_oss": (8, 14, 16)}
MODELS = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(autouse=True)
def registered() -> None:
    cake.register()
    torch._dynamo.reset()


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    kind, options = CONFIGS[family]
    config = getattr(transformers, kind)(**COMMON | options | changes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="cake", dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else p.add_(torch.randn_like(p) / 10)
    return model


def tokens() -> Tensor:
    return torch.randint(3, COMMON["vocab_size"], (2, 11))


def step(model: Any, ids: Tensor, run: Any = None) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter."""
    model.zero_grad()
    out = (model if run is None else run)(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    difference, norm = (got.double() - want.double()).norm(), want.double().norm()
    return (difference / norm).item() if norm else difference.item()


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in want.items()}
    assert not {name: e for name in want if not (e := error(got[name], want[name])) <= bound}


# Whole models


@MODELS
def test_model_equals_eager_in_fp32(family: str) -> None:
    model, ids = build(family), tokens()
    with count_launches() as launches:
        got = step(model, ids)
        assert launches["grouped_mm"] == LAUNCHES[family][0]
        model.set_experts_implementation("eager")
        assert_near(got, step(model, ids), 5e-6)
    assert launches["grouped_mm"] == LAUNCHES[family][0]  # none in the eager step


@MODELS
def test_model_is_near_eager_in_bf16(family: str) -> None:
    # One sparse layer: in a second one a rounding upstream could flip a choice, in either of the two.
    layers = 2 if family == "deepseek_v3" else 1
    model, ids = build(family, torch.bfloat16, num_hidden_layers=layers), tokens()
    got = step(model, ids)
    model.set_experts_implementation("eager")
    assert_near(got, step(model, ids), 0.03)  # eager itself is 0.013 to 0.35 away from FP32


@MODELS
def test_generate_equals_eager(family: str) -> None:
    model, ids = build(family).eval(), tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with count_launches() as launches:
        got = model.generate(ids, **options)
    assert launches["grouped_mm"] == LAUNCHES[family][0] * (got.shape[1] - ids.shape[1])
    model.set_experts_implementation("eager")
    assert torch.equal(got, model.generate(ids, **options))


def test_from_pretrained(tmp_path: Path) -> None:
    model, ids = build("qwen3_moe"), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="cake")
    with count_launches() as launches:
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert launches["grouped_mm"] == 2 * LAUNCHES["qwen3_moe"][0]


@pytest.mark.parametrize(
    ("family", "checkpointed"), [*((family, False) for family in CONFIGS), ("qwen3_moe", True)]
)
def test_compiles_into_one_graph(family: str, checkpointed: bool) -> None:
    model, ids = build(family).train(), tokens()
    want = step(model, ids)
    if checkpointed:
        model.gradient_checkpointing_enable()
    with count_launches() as launches:
        got = step(model, ids, torch.compile(model, fullgraph=True, backend="aot_eager"))
    once, stopped, twice = LAUNCHES[family]  # compiled, the partitioner decides what runs again
    assert launches["grouped_mm"] in (range(stopped, twice) if checkpointed else [once])
    assert_near(got, want, 1e-6)


def test_compiles_with_inductor_for_any_number_of_tokens() -> None:
    experts = Experts.make("gated", torch.float32)
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(experts, fullgraph=True, dynamic=True)
        for rows in (9, 20):
            x, ids, weight = routed(rows)
            assert error(compiled(x, ids, weight), experts(x, ids, weight)) < 1e-6


@MODELS
def test_checkpointing_launches_and_changes_no_bit(family: str) -> None:
    model, ids = build(family).train(), tokens()
    want = step(model, ids)
    model.gradient_checkpointing_enable()
    for early_stop, expected in zip((True, False), LAUNCHES[family][1:], strict=True):
        with count_launches() as launches, set_checkpoint_early_stop(early_stop):
            got = step(model, ids)
        assert launches["grouped_mm"] == expected
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_autocast(family: str) -> None:
    model, ids = build(family, num_hidden_layers=1), tokens()
    with torch.autocast("cpu", torch.bfloat16), count_launches() as launches:
        got = step(model, ids)
    assert launches["grouped_mm"] == LAUNCHES[family][0] / 2
    model.set_experts_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(got, step(model, ids), 0.02)


# Experts alone, in every form that the registry knows

FLAGS = {
    "gated": {},
    "biased": {"has_bias": True},
    "plain-biased": {"has_gate": False, "has_bias": True},
    "transposed": {"is_transposed": True},
    "gpt-oss": {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    "normed-biased": {"has_post_expert_norm": True, "has_bias": True},
}
FORMS = pytest.mark.parametrize("form", FLAGS)


class Experts(nn.Module):
    """E = 5 experts as the registry's decorator expects them, with ``flags`` of the decorator."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        e, h, i = 5, 32, 23
        self.num_experts = e
        n = 2 * i if config.flags.get("has_gate", True) else i
        name = "gate_up_proj" if n > i else "up_proj"
        for key, shape in ((name, (e, n, h)), ("down_proj", (e, h, i))):
            if config.flags.get("is_transposed"):
                shape = (e, shape[2], shape[1])
            setattr(self, key, nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5))
        if config.flags.get("has_bias"):
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(e, n)))
            self.down_proj_bias = nn.Parameter(torch.randn(e, h))
        if config.flags.get("has_post_expert_norm"):
            self.post_expert_norm = nn.RMSNorm(h, eps=1e-6)
        self.act_fn = ACT2FN["silu"]

    @classmethod
    def make(cls, form: str, dtype: torch.dtype) -> Experts:
        if (
            not FLAGS[form].keys()
            <= inspect.signature(use_experts_implementation).parameters.keys()
        ):
            pytest.skip("this release of transformers has no such experts")
        kind = type(form, (cls,), {"forward": lambda self, *args: pytest.fail("not dispatched")})
        config = SimpleNamespace(_experts_implementation="cake", flags=FLAGS[form])
        return use_experts_implementation(kind, **FLAGS[form])(config).to(dtype)

    def reference(self, x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        """One choice of one token after the other, in the dtype of the parameters."""
        name = "gate_up_proj" if self.has_gate else "up_proj"

        def linear(v: Tensor, key: str, e: int) -> Tensor:
            w = getattr(self, key)[e]
            y = v @ w if self.is_transposed else w @ v
            return y + getattr(self, f"{key}_bias")[e] if self.has_bias else y

        rows = []
        for t in range(len(x)):
            total = torch.zeros_like(x[t])
            for e, factor in zip(ids[t].tolist(), weight[t], strict=True):
                if e < self.num_experts:
                    up = linear(x[t], name, e)
                    hidden = self._apply_gate(up) if self.has_gate else self.act_fn(up)
                    y = linear(hidden, "down_proj", e)
                    norm = getattr(self, "post_expert_norm", nn.Identity())
                    total = total + norm(y) * factor
            rows.append(total)
        return torch.stack(rows)


def routed(rows: int, dtype: torch.dtype = torch.float32, experts: int = 4) -> tuple[Tensor, ...]:
    """Tokens, ids and FP32 weights, top-3; with ``experts`` of 4, expert 4 has no token."""
    ids = torch.stack([torch.randperm(max(experts, 3))[:3] for _ in range(rows)])
    return torch.randn(rows, 32, dtype=dtype), ids, torch.rand(rows, 3)


@FORMS
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 0.012)])
@pytest.mark.parametrize("sentinels", [False, True], ids=["all", "sentinels"])
def test_experts_against_fp64(form: str, dtype: torch.dtype, bound: float, sentinels: bool) -> None:
    experts = Experts.make(form, dtype)
    # ids 5 and 6 live on another rank; their weights are not zero here, and must not matter
    x, ids, weight = routed(37, dtype, experts=7 if sentinels else 4)
    assert (ids >= 5).any() == sentinels
    precise = copy.deepcopy(experts).double()

    def run(module: nn.Module, forward: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
        leaves = tuple(t.clone().requires_grad_() for t in leaves)
        y = forward(leaves[0], ids, leaves[1])
        y.backward(g.to(y.dtype))
        return [y.detach(), *(t.grad for t in (*leaves, *module.parameters()))]

    g = torch.randn_like(x)
    got = run(experts, experts, x, weight)
    want = run(precise, precise.reference, x.double(), weight.double())
    assert [t.dtype for t in got[:3]] == [dtype, dtype, torch.float32]
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) <= bound, errors
    if sentinels:
        assert not got[2][ids >= 5].any()  # exactly no gradient for the weight of a sentinel


def test_a_token_without_an_expert_here_reaches_nothing() -> None:
    experts = Experts.make("gpt-oss", torch.float32)
    x, ids, weight = routed(9)
    x[3], ids[3] = float("nan"), 5
    x.requires_grad_()
    y = experts(x, ids, weight)
    y.sum().backward()
    assert not y[3].any() and not x.grad[3].any()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in experts.parameters())


@pytest.mark.parametrize("rows", [0, 1])
def test_no_token_and_one(rows: int) -> None:
    experts = Experts.make("biased", torch.float32)
    y = experts(torch.randn(rows, 32), torch.full((rows, 1), 4), torch.rand(rows, 1))
    y.sum().backward()
    assert y.shape == (rows, 32)
    assert all(not p.grad[:4].any() and p.grad.isfinite().all() for p in experts.parameters())


@pytest.mark.parametrize("form", ["gated", "transposed"])
def test_weights_are_read_in_place(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, spy = Experts.make(form, torch.float32), Mock(side_effect=cake_ops.grouped_mm)
    monkeypatch.setattr(cake, "grouped_mm", spy)
    experts(*routed(9)).sum().backward()
    weights = [experts.gate_up_proj, experts.down_proj]
    assert [c.args[1].data_ptr() for c in spy.mock_calls] == [w.data_ptr() for w in weights]
    assert all(w.grad.stride() == w.stride() for w in weights)


@FORMS
def test_nothing_waits_adds_in_arrival_order_or_projects_down_twice(form: str) -> None:
    calls: list[tuple[str, Any]] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func.overloadpacket.__name__, getattr((*args, 0, 0)[1], "shape", None)))
            return func(*args, **(kwargs or {}))

    experts, (x, ids, weight) = Experts.make(form, torch.float32), routed(9)
    with Log():
        y = checkpoint(experts, x.requires_grad_(), ids, weight, use_reentrant=False)
        y.sum().backward()
    names = " ".join(name for name, _ in calls)
    assert "grouped_mm_dgrad" in names and "grouped_mm_wgrad" in names and "sort" in names
    waits = r"_local_scalar_dense|item|nonzero|unique|bincount|masked_select"
    assert not re.search(rf"{waits}|scatter_add|index_add|index_put", names)
    assert calls.count(("grouped_mm", (5, 32, 23))) == (2 if form == "normed-biased" else 1)
    assert calls.count(("grouped_mm", (5, 46, 32))) == (0 if form.startswith("plain") else 2)


# Registration


def test_register_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cake.register()
    assert ALL_EXPERTS_FUNCTIONS["cake"] is cake.experts_forward
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17, found 5\.3\.0"):
        cake.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17, which is not installed"):
        cake.register()


# Routers


@MODELS
def test_router_mm_equals_the_routers_own_product_in_fp32(family: str) -> None:
    model, ids = build(family), tokens()
    want = step(model, ids)
    routers = cake.use_router_mm(model)
    assert len(routers) == LAUNCHES[family][0] // (4 if family == "gpt_oss" else 2)
    assert cake.use_router_mm(model) == routers
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        with count_launches() as launches:
            got = step(model, ids, run)
        assert launches["router_mm"] == launches["router_mm_wgrad"] == len(routers)
        assert_near(got, want, 5e-6)


@MODELS
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_fp32_products(family: str, autocast: bool) -> None:
    model = build(family, torch.float32 if autocast else torch.bfloat16)
    plain, (*_, name) = copy.deepcopy(model), cake.use_router_mm(model)
    router = copy.deepcopy(model).get_submodule(name)
    assert isinstance(router, type(plain.get_submodule(name)))
    x = torch.randn(7, COMMON["hidden_size"], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = router(x)[0]
    want = x.double() @ router.weight.double().t() + getattr(router, "bias", torch.zeros(1))
    assert logits.dtype == torch.float32 and error(logits, want) < 5e-7
    step(model, tokens())  # the experts take FP32 routing weights beside BF16 tokens


def test_routers_of_another_build_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no router beside its experts"):
        cake.use_router_mm(nn.Linear(2, 2))
    model = build("qwen3_moe")
    model.model.layers[1].mlp.gate = nn.Sequential(nn.Linear(32, 6))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate must .* got Sequential"):
        cake.use_router_mm(model)
    assert type(model.model.layers[0].mlp.gate).__name__ == "Qwen3MoeTopKRouter"


@pytest.mark.usefixtures("unseen_gpu")
def test_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs/transformers.md").read_text()
    (source,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert "assert" in source
    (tmp_path / "snippet.py").write_text(source)
    runpy.run_path(str(tmp_path / "snippet.py"))
