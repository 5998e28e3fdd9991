"""Who else looks at a weight with ``main_grad``: hooks, Megatron's and torch's DDP, FSDP2, compilers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forms import assert_close, same_bits
from main_grad import (
    KINDS,
    ROWS,
    make,
    with_megatron_hook,
)
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops.testing import count_launches

# Hooks


def test_hooks_of_a_plain_weight_see_none() -> None:
    case = make("router")
    seen: list[Any] = []
    case.weight.register_hook(seen.append)
    x, g = case.batch()
    case.fused(x).backward(g)
    assert seen == [None] and case.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_hook_finds_a_placeholder_and_adds_nothing(
    device: torch.device, kind: str
) -> None:
    case = make(kind, device)
    expected, calls = case.weight.main_grad.clone(), with_megatron_hook(case.weight)
    for micro_batch in range(1, 3):
        x, g = case.batch()
        case.fused(x, *case.offs).backward(g)
        case.add(expected, g, x)
        added, placeholder = calls[micro_batch]
        assert added and case.weight.grad is None
        assert (placeholder.shape, placeholder.dtype) == (case.weight.shape, case.weight.dtype)
    assert len(calls) == 3
    assert same_bits(case.weight.main_grad, expected)


def test_megatron_weight_that_is_also_used_elsewhere(device: torch.device) -> None:
    """``zero_out_wgrad``: what another use contributes to ``weight.grad`` is added by the hook."""
    case = make("router", device)
    expected, calls = case.weight.main_grad.clone(), with_megatron_hook(case.weight)
    case.weight.zero_out_wgrad = True
    x, g = case.batch()
    ((case.fused(x) * g).sum() + 3 * case.weight.sum()).backward()
    case.add(expected, g, x)
    assert len(calls) == 2 and (calls[1][1] == 3).all()
    assert_close(case.weight.main_grad, expected.double() + 3)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_ddp_leaves_main_grad_to_the_user(one_rank: None, options: dict[str, bool]) -> None:
    case = make("router")
    expected, wrapped = (
        case.weight.main_grad.clone(),
        DistributedDataParallel(case.fused, **options),
    )
    for _ in range(2):  # the reducer of an earlier step is complete
        x, g = case.batch()
        wrapped(x).backward(g)
        case.add(expected, g, x)
        case.plain(x).backward(g)
    assert same_bits(case.weight.main_grad, expected)
    assert not case.weight.grad.any()
    assert same_bits(case.fused.bias.grad, case.plain.bias.grad)


def test_fsdp_raises_unless_it_ignores_the_weight(one_rank: None) -> None:
    case = make("router")
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()
    sharded = copy.deepcopy(case.fused)
    sharded.weight.main_grad = case.weight.main_grad.clone()
    mesh = init_device_mesh("cpu", (1,))  # beside a GPU the default is not the CPU
    with pytest.raises(RuntimeError, match="which weight .* does not have"):
        fully_shard(sharded, mesh=mesh)(x)
    fully_shard(case.fused, mesh=mesh, ignored_params={case.weight})(x).backward(g)
    case.add(expected, g, x)
    assert same_bits(case.weight.main_grad, expected)


# Compilers


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_modules_fuse(device: torch.device, kind: str, backend: str) -> None:
    torch._dynamo.reset()
    case = make(kind, device, bias=False)
    expected = case.weight.main_grad.clone()
    compiled = torch.compile(case.fused, fullgraph=True, backend=backend)
    for rows in (ROWS, ROWS + 20, ROWS + 21):
        x, g = case.batch(rows)
        with count_launches() as launches:
            compiled(x, *case.offs).backward(g)
        assert launches[f"{case.name}_wgrad_"] == 1 and not launches[f"{case.name}_wgrad"]
        case.add(expected, g, x)
        case.weight.main_grad = case.weight.main_grad.clone()  # no graph keeps the old one
    assert same_bits(case.weight.main_grad, expected)
    assert case.weight.grad is None
    with torch.no_grad():
        assert not compiled(x, *case.offs).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_checkpoint_fuses(kind: str) -> None:
    torch._dynamo.reset()
    case = make(kind, bias=False)
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def region(x: Tensor) -> Tensor:
        return checkpoint(case.fused, x.sigmoid(), *case.offs, use_reentrant=False)

    with count_launches() as launches:
        region(x).backward(g)
    adds = {f"{case.name}_dgrad": 1, f"{case.name}_wgrad_": 1}
    assert launches == Counter({case.name: 1, **adds})
    case.add(expected, g, x.sigmoid())
    assert same_bits(case.weight.main_grad, expected)


def test_compiling_breaks_the_graph_where_a_flag_has_to_be_set() -> None:
    """The product, compiled apart from the weight's node, makes a gradient, which is then added."""
    torch._dynamo.reset()
    case = make("router")
    expected, calls = case.weight.main_grad.clone(), with_megatron_hook(case.weight)
    compiled = torch.compile(case.fused, backend="aot_eager")
    for micro_batch in range(1, 3):
        x, g = case.batch()
        with count_launches() as launches:
            compiled(x).backward(g)
        assert launches["router_mm_wgrad"] == 1
        expected += cake_ops.router_mm_wgrad(g, x.detach())
        assert calls[micro_batch][0]
    assert len(calls) == 3
    assert same_bits(case.weight.main_grad, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot set weight.grad_added_to_main"):
        torch.compile(case.fused, backend="aot_eager", fullgraph=True)(x)


def test_compiled_autograd_adds_the_gradient() -> None:
    torch._dynamo.reset()
    case = make("router")
    expected = case.weight.main_grad.clone()
    for _ in range(2):
        x, g = case.batch()
        y = case.fused(x)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            y.backward(g)
        expected += cake_ops.router_mm_wgrad(g, x.detach())
    assert same_bits(case.weight.main_grad, expected)
    assert case.weight.grad is None
