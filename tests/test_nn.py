"""The modules: values against torch's, gradients, state, and that compiling changes nothing."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from forms import NAN, Place, assert_close, assert_refused_alike, same_bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cake_ops.nn import GroupedLinear, RouterLinear

BF16, FP32 = torch.bfloat16, torch.float32
GROUPS, TAIL, N, K = [7, 0, 63, 9, 0], 3, 40, 24


def expert_layers(module: GroupedLinear) -> list[nn.Linear]:
    """FP64 copies of the experts as modules of torch."""
    layers = []
    for e in range(module.num_experts):
        layer = nn.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            device=module.weight.device,
            dtype=torch.float64,
        )
        with torch.no_grad():
            layer.weight.copy_(module.weight[e])
            if module.bias is not None:
                layer.bias.copy_(module.bias[e])
        layers.append(layer)
    return layers


def reference_loop(layers: list[nn.Linear], x: Tensor, offs: Tensor) -> Tensor:
    rows = [layer(x[i:j]) for layer, (i, j) in zip(layers, reference.ranges(offs), strict=True)]
    return torch.cat([*rows, x.new_zeros(x.shape[0] - int(offs[-1]), layers[0].out_features)])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_grouped_linear_is_a_loop_over_linear(place: Place, bias: bool) -> None:
    """Values and gradients; the tail rows are zero and take no part, bias included."""
    module = GroupedLinear(len(GROUPS), K, N, bias, device=place.device, dtype=place.dtype)
    offs = reference.offsets(GROUPS, place.device)
    rows = sum(GROUPS)
    x = torch.randn(rows + TAIL, K, device=place.device).to(place.dtype)
    x[rows:] = NAN
    x.requires_grad_()
    y = module(x, offs)
    layers = expert_layers(module)
    x64 = x.detach().double().requires_grad_()
    expected = reference_loop(layers, x64, offs)
    bound = 2 * reference.tolerance(place.dtype)  # the product is rounded, then the sum
    assert y.dtype == place.dtype and (y[rows:] == 0).all()
    assert_close(y, expected, bound)
    g = torch.randn(y.shape, device=place.device).to(place.dtype)
    y.backward(g)
    expected.backward(g.double())
    assert_close(x.grad, x64.grad.nan_to_num())
    assert_close(module.weight.grad, torch.stack([layer.weight.grad for layer in layers]))
    if bias:
        assert_close(module.bias.grad, torch.stack([layer.bias.grad for layer in layers]))
        assert (module.bias.grad[[1, 4]] == 0).all()


def test_grouped_linear_with_strided_offs_and_bias(device: torch.device, recwarn) -> None:
    module = GroupedLinear(3, 8, 16, True, device=device, dtype=BF16)
    x = torch.randn(20, 8, device=device).to(BF16)
    offs = reference.offsets([5, 0, 9], device)
    strided = torch.stack([offs, torch.zeros_like(offs)], 1)[:, 0]
    assert same_bits(module(x, strided), module(x, offs))
    assert not recwarn.list


def test_grouped_linear_under_autocast_keeps_fp32_parameters(device: torch.device) -> None:
    module = GroupedLinear(len(GROUPS), K, N, True, device=device)
    offs = reference.offsets(GROUPS, device)
    x = torch.randn(sum(GROUPS), K, device=device)
    with torch.autocast(device.type, dtype=BF16):
        y = module(x, offs)
    assert y.dtype == BF16
    low = copy.deepcopy(module).to(BF16)
    assert same_bits(y, low(x.to(BF16), offs))
    y.float().square().mean().backward()
    assert module.weight.grad.dtype == module.bias.grad.dtype == FP32
    g = (2 * y.detach().float() / y.numel()).to(BF16)
    assert_close(
        module.weight.grad,
        reference.grouped_mm_wgrad(g, x.to(BF16), offs),
        reference.tolerance(BF16),
    )


class Options(TorchDispatchMode):
    """Remembers what ``deterministic`` the operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cake":
            self.seen[func.name()] = (kwargs or {}).get("deterministic", True)
        return func(*args, **(kwargs or {}))


def test_grouped_linear_hands_deterministic_to_its_weight_gradient(device: torch.device) -> None:
    x, offs = torch.randn(9, K, device=device).to(BF16), reference.offsets([4, 5], device)
    for deterministic in (True, False):
        module = GroupedLinear(2, K, N, deterministic=deterministic, device=device, dtype=BF16)
        with Options() as options:
            module(x, offs).sum().backward()
        assert options.seen["cake::grouped_mm_wgrad"] is deterministic


def test_h33_bias_gradient_is_summed_in_fp32(device: torch.device) -> None:
    module = GroupedLinear(2, 8, 16, True, device=device, dtype=BF16)
    x, offs = torch.randn(5000, 8, device=device).to(BF16), reference.offsets([4096, 900], device)
    module(x, offs).sum().backward()
    assert (module.bias.grad[0] == 4096).all() and (module.bias.grad[1] == 900).all()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_grouped_linear_state(bias: bool) -> None:
    module = GroupedLinear(3, 8, 16, bias)
    names = ["weight", "bias"] if bias else ["weight"]
    assert list(module.state_dict()) == names == [name for name, _ in module.named_parameters()]
    assert module.weight.shape == (3, 16, 8) and module.weight.dtype == FP32
    assert bias == (module.bias is not None)
    other = GroupedLinear(3, 8, 16, bias)
    assert not torch.equal(other.weight, module.weight)
    assert str(other.load_state_dict(module.state_dict())) == "<All keys matched successfully>"
    for name in names:
        assert torch.equal(getattr(other, name), getattr(module, name))
    assert repr(module) == (
        f"GroupedLinear(num_experts=3, in_features=8, out_features=16, bias={bias})"
    )


def test_grouped_linear_is_initialised_as_linear() -> None:
    """Uniform in +-1/sqrt(K), by bound and by moments; a module made on meta can be reset."""
    module = GroupedLinear(4, 64, 200, True, device="meta").to_empty(device="cpu")
    for p in module.parameters():
        p.data.fill_(NAN)
    torch.manual_seed(1)
    module.reset_parameters()
    torch.manual_seed(2)
    layer = nn.Linear(64, 4 * 200)
    for ours, theirs in ((module.weight, layer.weight), (module.bias, layer.bias)):
        assert 0.95 / 8 < ours.abs().max() <= 1 / 8 and 0.95 / 8 < theirs.abs().max() <= 1 / 8
        assert abs(ours.std() / theirs.std() - 1) < 0.05
        assert abs(ours.mean()) < 0.1 / 8
    before = module.weight.clone()
    module.reset_parameters()
    assert not torch.equal(before, module.weight)


@pytest.mark.parametrize("w_dtype", [FP32, BF16], ids=["w-fp32", "w-bf16"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(24,), (7, 24), (2, 5, 24), (0, 3, 24)])
def test_router_linear_is_linear_in_fp32(
    device: torch.device,
    shape: tuple[int, ...],
    bias: bool,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> None:
    module = RouterLinear(24, 40, bias, device=device, dtype=w_dtype)
    x = torch.randn(shape, device=device).to(x_dtype).requires_grad_()
    y = module(x)
    x64 = x.detach().double().requires_grad_()
    twin = nn.Linear(24, 40, bias, device=device, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    expected = twin(x64)
    assert y.dtype == FP32
    assert_close(y, expected)
    g = torch.randn(y.shape, device=device)
    y.backward(g)
    expected.backward(g.double())
    for t, t64 in ((x, x64), *zip(module.parameters(), twin.parameters(), strict=True)):
        assert t.grad.dtype == t.dtype
        assert_close(t.grad, t64.grad)


def test_router_linear_stays_fp32_under_autocast(device: torch.device) -> None:
    module = RouterLinear(24, 40, device=device)
    x = torch.randn(7, 24, device=device)
    plain = module(x)
    with torch.autocast(device.type, dtype=BF16):
        assert same_bits(module(x), plain)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_router_linear_from_linear_shares_its_parameters(bias: bool) -> None:
    linear = nn.Linear(24, 40, bias).eval()
    random_state = torch.get_rng_state()
    gate = RouterLinear.from_linear(linear)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(gate, nn.Linear) and type(gate) is RouterLinear
    assert gate.weight is linear.weight and gate.bias is linear.bias
    assert not gate.training
    assert list(gate.state_dict()) == list(linear.state_dict())
    assert repr(gate) == f"RouterLinear(in_features=24, out_features=40, bias={bias})"
    x = torch.randn(7, 24)
    assert_close(gate(x), linear(x))
    with torch.no_grad():
        linear.weight.mul_(2)
    assert_close(gate(x), linear(x))


@pytest.mark.parametrize("deterministic", [True, False])
def test_router_linear_hands_deterministic_to_its_products(
    device: torch.device, deterministic: bool
) -> None:
    linear = nn.Linear(24, 40, device=device)
    x = torch.randn(7, 24, device=device, requires_grad=True)
    for gate in (
        RouterLinear(24, 40, deterministic=deterministic, device=device),
        RouterLinear.from_linear(linear, deterministic=deterministic),
    ):
        with Options() as options:
            gate(x).sum().backward()
        products = ("router_mm", "router_mm_dgrad", "router_mm_wgrad")
        assert options.seen == {f"cake::{name}": deterministic for name in products}
    assert RouterLinear.from_linear(linear).deterministic is True


def test_router_linear_refuses_rows_of_another_size() -> None:
    """A [.., 48] input of a gate with H = 24 must not be read as twice as many rows."""
    gate = RouterLinear(24, 40)
    for shape in ((48,), (7, 48), (2, 3, 48)):
        assert_refused_alike(
            "cake::router_mm: w must have H = x.shape[1] = 48 in dimension 1, got [40, 24]",
            lambda x, w: torch.func.functional_call(gate, {"weight": w}, (x,)),
            (torch.zeros(shape), gate.weight.detach()),
        )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", ["grouped", "router"])
def test_compiled_modules_give_the_same_bits(device: torch.device, kind: str, bias: bool) -> None:
    torch._dynamo.reset()
    if kind == "grouped":
        module = GroupedLinear(len(GROUPS), K, N, bias, device=device, dtype=BF16)
        x = torch.randn(sum(GROUPS) + TAIL, K, device=device).to(BF16)
        inputs = (x, reference.offsets(GROUPS, device))
    else:
        module = RouterLinear(K, N, bias, device=device)
        inputs = (torch.randn(2, 5, K, device=device),)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for function in (module, compiled):
        module.zero_grad()
        y = function(*inputs)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in module.parameters())])
    for eager, other in zip(*results, strict=True):
        assert same_bits(eager, other)
