"""FSDP2, DDP and expert parallelism over MoE layers on two gloo ranks, against one process in FP64.

The ranks are two processes that run this file as a script, once for all cases; each case reports alone.
The reference has the tokens of both ranks, so its gradients are those on which the ranks must agree.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe import (
    BF16,
    FP32,
    HIDDEN,
    TOP_K,
    batch,
    both,
    close,
    copies,
    expert_parallel,
    model,
    reference,
    share,
)
from ranks import ON_THE_CPU, recipe, torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cake_ops._problem import Problem
from cake_ops.distributed import combine, dispatch, local_experts
from cake_ops.testing import count_launches

pytestmark = pytest.mark.client

WORLD = 2
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def train(
    wrapped: nn.Module, plain: nn.Module, tokens=(23, 30), mine=slice(None), bound: float = FP32
) -> None:
    """SGD steps of data-parallel ranks and of the reference: gradients, weights and results agree.

    ``tokens`` of each rank; ``mine``: the experts that this rank holds.
    """
    rank, rate, p = dist.get_rank(), 0.3, copies(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate)
    for step in range(3):
        (x, g), (all_x, all_g) = batch(rank, tokens[rank], step), both(tokens, step)
        expected = reference(p, all_x)
        grads = torch.autograd.grad(expected, list(p.values()), all_g / WORLD)
        y = wrapped(x)
        close(y, expected.split(tokens)[rank], bound)  # after a step: with the new weights
        y.backward(g)
        for (name, q), d in zip(wrapped.named_parameters(), grads, strict=True):
            close(q.grad, d[mine] if "experts" in name else d, bound)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for q, d in zip(p.values(), grads, strict=True):
                q.sub_(rate * d)
                assert rate * d.norm() > 1e-2 * q.norm()  # a step that old weights would show


class Transfers(TorchDispatchMode):
    """Counts the transfers of rows, forward and backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is ALL_TO_ALL
        return func(*args, **(kwargs or {}))


# Cases, run on every rank

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def sharded(**options) -> nn.Sequential:
    mesh, shards = (
        init_device_mesh("cpu", (WORLD,)),
        model(experts=5),
    )  # an odd number: uneven shards
    for layer in shards:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(shards, mesh=mesh, **options)


def fsdp2(reshard: bool) -> None:
    shards, storages = sharded(reshard_after_forward=reshard), []
    shards[0].experts.down.register_forward_pre_hook(
        lambda module, args: storages.append(module.weight.untyped_storage())
    )
    with count_launches() as launches:
        train(shards, model(experts=5))
    assert launches["grouped_mm"] == 3 * 2 * 3 and launches["router_mm"] == 3 * 2  # none twice
    assert all(isinstance(q, DTensor) for q in shards.parameters())
    # The storage that is freed here is filled anew in the backward.
    shards(batch(0, 7)[0])
    assert (storages[-1].size() == 0) is reshard


CASES["fsdp2-reshard_after_forward"] = lambda: fsdp2(True)
CASES["fsdp2-keep_after_forward"] = lambda: fsdp2(False)


@case
def fsdp2_cpu_offload() -> None:
    train(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), model(experts=5))


@case
def fsdp2_bf16_experts_beside_an_fp32_router() -> None:
    shards, mesh = model(experts=5, layers=1), init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(shards[0].experts, mesh=mesh, mp_policy=policy)
    train(fully_shard(shards, mesh=mesh), model(experts=5, layers=1), bound=BF16)


@case
def ddp_gradient_as_bucket_view() -> None:
    ddp = DistributedDataParallel(model(experts=5), gradient_as_bucket_view=True)
    train(ddp, model(experts=5))
    ddp(batch(0, 9)[0]).sum().backward()
    assert len({q.grad.untyped_storage().data_ptr() for q in ddp.parameters()}) == 1  # one bucket


def ep_against_one_process(
    tokens: tuple[int, int], experts: int, ids: list[Tensor] | None = None
) -> nn.Sequential:
    rank, whole = dist.get_rank(), model(experts, layers=1)
    part, p, (all_x, all_g) = expert_parallel(whole), copies(whole), both(tokens)
    expected = reference(p, all_x, None if ids is None else torch.cat(ids))
    d_x, *grads = torch.autograd.grad(expected, [all_x, *p.values()], all_g)

    x, g = batch(rank, tokens[rank])
    runs = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        part.zero_grad()
        y = part[0](x, None if ids is None else ids[rank])
        y.backward(g)
        runs.append([y, x.grad, *(q.grad for q in part.parameters())])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)  # bit for bit
    close(y, expected.split(tokens)[rank])
    close(x.grad, d_x.split(tokens)[rank])
    for (name, q), d in zip(part.named_parameters(), grads, strict=True):
        d = d[share(experts)] if "experts" in name else d
        grad = q.grad.clone()
        if "router" in name:
            dist.all_reduce(grad)
        close(grad, d)
        assert torch.equal((grad == 0).flatten(1).all(1), (d == 0).flatten(1).all(1))
    return part


@case
def ep_uneven_tokens() -> None:
    for tokens, experts in (((37, 5), 6), ((1, 63), 2), ((100, 257), 8)):
        ep_against_one_process(tokens, experts)


@case
def ep_rank_without_tokens_h07() -> None:
    for tokens in ((0, 19), (7, 0), (0, 0)):
        ep_against_one_process(tokens, 4)


@case
def ep_rank_whose_experts_get_no_rows_h07() -> None:
    for tokens in ((9, 14), (0, 14)):
        for target in range(WORLD):
            ids = [torch.rand(n, 2).argsort(1) + 2 * target for n in tokens]
            for q in ep_against_one_process(tokens, 4, ids)[0].experts.parameters():
                assert q.grad is not None and bool(q.grad.any()) is (dist.get_rank() == target)


@case
def ep_layout_of_the_rows() -> None:
    """By local expert, then source rank, then token; identity experts give the weighted sum of x."""
    rank, sent = dist.get_rank(), [batch(r, n)[0] for r, n in enumerate((11, 6))]
    ids = [torch.randint(4, (len(x), 3)) for x in sent]  # an expert may come twice
    for dtype, bound in ((torch.float64, 1e-6), (torch.bfloat16, 4e-3)):
        x, weights = sent[rank].to(dtype), torch.rand(len(sent[rank]), 3)
        rows, offs, state = dispatch(x, ids[rank].int(), weights, 4)
        mine = [
            torch.cat([sent[r][(ids[r] == e).nonzero()[:, 0]] for r in (0, 1)])
            for e in local_experts(4)
        ]
        assert rows.dtype == dtype and torch.equal(rows, torch.cat(mine).to(dtype))
        assert offs.dtype == torch.int32
        assert torch.equal(offs, torch.tensor([len(part) for part in mine]).cumsum(0).int())
        y = combine(rows, state)
        assert y.dtype == dtype
        close(y, x.double() * weights.double().sum(1, True), bound)


@case
def ep_wrong_arguments() -> None:
    x, ids, w = torch.randn(3, HIDDEN), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for bad in (-1, 4):  # of one rank: it raises on all
        mixed = ids.clone()
        mixed[1] = bad if dist.get_rank() == 1 else 3
        with pytest.raises(RuntimeError, match=r"expert_ids must be in \[0, 4\).* 2 of rank 1$"):
            dispatch(x, mixed, w, 4)
    for arguments, message in (
        ((x[0], ids, w, 4), r"x must have shape \[T, K\], got \[12\]"),
        ((x, ids[:2], w, 4), r"expert_ids must have shape \[T, k\] with T = 3"),
        ((x, ids.float(), w, 4), "expert_ids must be integers, got torch.float32"),
        (
            (x, ids, w[:, :1], 4),
            r"weights must have the shape of expert_ids, \[3, 2\], got \[3, 1\]",
        ),
        ((x, ids, w, 5), "num_experts must be a positive multiple of the group's size 2, got 5"),
    ):
        with pytest.raises(RuntimeError, match=message):
            dispatch(*arguments)
    rows, _, state = dispatch(x, ids, w, 4)
    with pytest.raises(RuntimeError, match=rf"R = {len(rows)}, got \[{len(rows) + 1}, 12\]"):
        combine(torch.randn(len(rows) + 1, HIDDEN), state)


@case
def ep_checkpoints_launch_and_send_no_more_than_they_say() -> None:
    layer, tokens = expert_parallel(model(4, layers=1))[0], (26, 0)
    x, g = batch(dist.get_rank(), tokens[dist.get_rank()])
    saved = [torch.ops.cake.grouped_mm.default, ALL_TO_ALL]

    def checkpointed(**options) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(layer, x, **options)

    def experts_alone(x: Tensor) -> Tensor:
        weights, ids = layer.router(x).softmax(-1).topk(TOP_K)
        rows, offs, state = dispatch(x, ids, weights, 4)
        return x + combine(checkpoint(layer.experts, rows, offs, use_reentrant=False), state)

    def contexts():
        return create_selective_checkpoint_contexts(saved)

    outcomes = []
    for run, products, transfers in (
        (layer, 3, 4),  # up, its bias, down; two transfers forward and two backward
        (checkpointed(use_reentrant=False), 6, 6),
        (checkpointed(use_reentrant=True), 6, 6),
        (checkpointed(use_reentrant=False, context_fn=contexts), 3, 4),
        (experts_alone, 5, 4),  # down is the last of its region: not computed again
    ):
        layer.zero_grad()
        x = x.detach().requires_grad_()
        with count_launches() as launches, Transfers() as sent:
            run(x).backward(g)
        assert (launches["grouped_mm"], sent.count) == (products, transfers)
        assert launches["grouped_mm_wgrad"] == 3
        outcomes.append([x.grad, *(q.grad for q in layer.parameters())])
    for outcome in outcomes:
        for actual, expected in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(actual, expected)


@case
def ep_compiled_around_the_host_sync() -> None:
    layer, (x, g), outcomes = expert_parallel(model(4, layers=1)), batch(dist.get_rank(), 21), []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        y = run(x)
        y.backward(g)
        outcomes.append([y, *(q.grad for q in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def ep_with_fsdp2(dp: int, ep: int) -> None:
    """As docs/distributed.md: experts over "ep" and sharded over "dp", the rest over all ranks."""
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    group, whole = mesh["ep"].get_group(), model(4, layers=1)
    for tokens in ((23, 30), (23, 0)):
        part = expert_parallel(whole, group)
        fully_shard(part[0].experts, mesh=mesh["dp"])
        part[0].experts.set_gradient_divide_factor(WORLD)
        part[0].experts.set_force_sum_reduction_for_comms(ep < WORLD)
        fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)))
        train(part, whole, tokens, share(4, group))


CASES["ep_with_fsdp2-dp1-ep2"] = lambda: ep_with_fsdp2(1, 2)
CASES["ep_with_fsdp2-dp2-ep1"] = lambda: ep_with_fsdp2(2, 1)


@case
def swapped_storage_is_never_read() -> None:
    """``param.data = ...`` before the forward, and between forward and backward."""
    layer = expert_parallel(model(4, layers=1))
    x, g = batch(dist.get_rank(), 21)

    def swap() -> None:
        for q in layer.parameters():
            old, q.data = q.data, q.data.clone()
            old.fill_(float("nan"))

    outcomes = []
    for swaps in (lambda: None, swap, swap):
        layer.zero_grad()
        swaps()
        y = layer(x)
        swaps()
        y.backward(g)
        outcomes.append([y, *(q.grad for q in layer.parameters())])
    for outcome in outcomes:
        for actual, expected in zip(outcome, outcomes[0], strict=True):
            assert actual.isfinite().all() and torch.equal(actual, expected)


# The processes


def worker(folder: Path) -> None:
    allocate = Problem.allocate  # results start as NaN: an element that is not written cannot pass
    Problem.allocate = lambda *args, **kwargs: allocate(*args, **kwargs).fill_(float("nan"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, str | None] = {}
    for name, check in CASES.items():
        torch.manual_seed(0)  # the same on both ranks
        try:
            check()
            report[name] = None
        except Exception:  # noqa: BLE001  (reported to the test)
            report[name] = traceback.format_exc()
            traceback.print_exc()  # if a rank cannot end well after this, its log is all there is
    (folder / str(dist.get_rank())).write_bytes(pickle.dumps(report))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort the teardown of the interpreter: pytorch/pytorch#179291


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(WORLD, __file__, str(folder), **ON_THE_CPU)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, reports: list[dict[str, str | None]]) -> None:
    for rank, report in enumerate(reports):
        assert report[name] is None, f"rank {rank}:\n{report[name]}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_recipe_in_the_docs_runs(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(recipe() + "os._exit(0)  # as in worker()\n")
    torchrun(ranks, str(tmp_path / "train.py"), **ON_THE_CPU)


def test_importing_the_package_leaves_it_alone() -> None:
    code = "import sys, cake_ops; sys.exit('cake_ops.distributed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
