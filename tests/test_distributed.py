"""DTensor on two gloo ranks: values, gradients and placements of every sharding rule, checkpoint, compile.

The ranks are two processes that run this file as a script, once for all tests; each case reports alone.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, OPERATORS, SmallProblem, problem
from ranks import ON_THE_CPU
from torch import Tensor

import cake_ops
from cake_ops.testing import count_launches

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

WORLD = 2
R = Replicate()
# The dimensions of x, w, g, and which of them may be sharded. offs counts local rows, so the rows (M) of a
# grouped problem may not; E is not sharded either, since each rank would need other rows.
DIMENSIONS = {
    "grouped_mm": ("MK", "ENK", "MN", "NK"),
    "router_mm": ("MK", "NK", "MN", "MNK"),
    "dense_mm": ("BMK", "NK", "BMN", "BMNK"),
    "batched_mm": ("LMK", "LNK", "LMN", "LMNK"),
}


def rules(name: str) -> dict[str, tuple[Placement, Placement, Placement]]:
    """For each dimension (and ""): placements of the two operands and of the result."""
    family, _, form = name.partition("_mm")
    x, w, g, shardable = DIMENSIONS[f"{family}_mm"]
    a, b, y = {"": (x, w, g), "_dgrad": (g, w, x), "_wgrad": (g, x, w)}[form]
    found = {"": (R, R, R)}
    for letter in shardable:
        operands = (Shard(t.index(letter)) if letter in t else R for t in (a, b))
        found[letter] = (*operands, Shard(y.index(letter)) if letter in y else Partial())
    return found


def distribute(mesh: DeviceMesh, t: Tensor, placement: Placement) -> DTensor:
    return distribute_tensor(t.detach(), mesh, [placement]).requires_grad_(t.requires_grad)


def on_mesh(mesh: DeviceMesh, op: SmallProblem) -> tuple[DTensor, ...]:
    return tuple(distribute(mesh, t, R) for t in op.offs)


def close(actual: DTensor | Tensor, expected: Tensor) -> None:
    if isinstance(actual, DTensor):
        actual = actual.full_tensor()
    torch.testing.assert_close(actual, expected)


# Cases, run on every rank

CASES: dict[str, Callable[[DeviceMesh], None]] = {}


def first_call_in_inference_mode(mesh: DeviceMesh) -> None:
    """No autograd kernel runs here, and this is the first DTensor call of the process."""
    op = problem("grouped_mm")
    a, b = op.operands()
    with torch.inference_mode():
        y = op.overload(distribute(mesh, a, R), distribute(mesh, b, Shard(1)), *on_mesh(mesh, op))
        assert y.placements == (Shard(1),)
        close(y, op(a, b))


CASES["first_call_in_inference_mode"] = first_call_in_inference_mode


def case(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CASES[function.__name__] = function
    return function


def rule_case(name: str, letter: str) -> Callable[[DeviceMesh], None]:
    def check(mesh: DeviceMesh) -> None:
        op = problem(name)
        operands = op.operands()
        g = torch.randn(op.result, dtype=op.dtype)
        expected = op(*operands)
        expected_grads = torch.autograd.grad(expected, operands, g)

        *placements, result = rules(name)[letter]
        a, b = (distribute(mesh, t, p) for t, p in zip(operands, placements, strict=True))
        with count_launches() as launches:
            y = op.overload(a, b, *on_mesh(mesh, op))
            assert launches == Counter([name])
        assert y.placements == (result,), (y.placements, result)
        close(y, expected)
        (y.full_tensor() * g).sum().backward()
        for t, d in zip((a, b), expected_grads, strict=True):
            # A gradient of an operand that lacks the sharded dimension is a sum over it.
            wanted = (Partial(),) if letter and t.placements == (R,) else t.placements
            assert t.grad.placements == wanted, (t.grad.placements, wanted)
            close(t.grad, d)

    return check


RULES = [(name, letter) for name in OPERATORS for letter in rules(name)]
CASES.update({f"rule-{name}-{letter}": rule_case(name, letter) for name, letter in RULES})


@case
def sharded_rows_or_experts_are_gathered(mesh: DeviceMesh) -> None:
    op = problem("grouped_mm")
    a, b = op.operands()
    offs = on_mesh(mesh, op)
    for placements in ((Shard(0), R), (R, Shard(0)), (Shard(0), Shard(0)), (Shard(1), R)):
        y = op.overload(
            *(distribute(mesh, t, p) for t, p in zip((a, b), placements, strict=True)), *offs
        )
        close(y, op(a, b))


@case
def options_pass_through(mesh: DeviceMesh) -> None:
    op = problem("grouped_mm_wgrad")
    g, x = (t.detach() for t in op.operands(torch.bfloat16))
    placed = (distribute(mesh, g, Shard(1)), distribute(mesh, x, R), *on_mesh(mesh, op))
    options = {"out_dtype": torch.float32, "deterministic": False}
    dw = cake_ops.grouped_mm_wgrad(*placed, **options)
    assert dw.dtype == torch.float32 and dw.placements == (Shard(1),)
    close(dw, cake_ops.grouped_mm_wgrad(g, x, *op.offs, **options))
    for name in ("router_mm", "dense_mm", "batched_mm"):
        op = problem(name)
        a, b = (t.detach() for t in op.operands())
        y = op.overload(distribute(mesh, a, R), distribute(mesh, b, R), deterministic=False)
        close(y, op(a, b))


def experts_block(x: Tensor, up: Tensor, down: Tensor, offs: Tensor) -> Tensor:
    """Column- then row-parallel experts."""
    return cake_ops.grouped_mm(
        torch.nn.functional.silu(cake_ops.grouped_mm(x, up, offs)), down, offs
    )


def block_operands(mesh: DeviceMesh) -> tuple[list[Tensor], list[DTensor], Tensor]:
    offs = problem("grouped_mm").offs[0]
    plain = [torch.randn(s, requires_grad=True) for s in ((10, 6), (3, 8, 6), (3, 6, 8))]
    placements = (R, Shard(1), Shard(2))
    return plain, [distribute(mesh, t, p) for t, p in zip(plain, placements, strict=True)], offs


@case
def tensor_parallel_experts_and_their_checkpoint(mesh: DeviceMesh) -> None:
    plain, placed, offs = block_operands(mesh)
    expected = experts_block(*plain, offs)
    grads = torch.autograd.grad(expected.sum(), plain)
    d_offs = distribute(mesh, offs, R)
    for run, forwards in (
        (experts_block, 2),
        (lambda *args: checkpoint(experts_block, *args, use_reentrant=False), 3),
    ):
        with count_launches() as launches:
            y = run(*placed, d_offs)
            assert y.placements == (Partial(),)
            y.full_tensor().sum().backward()
        assert launches == Counter(grouped_mm=forwards, grouped_mm_dgrad=2, grouped_mm_wgrad=2)
        close(y, expected)
        for t, d in zip(placed, grads, strict=True):
            close(t.grad, d)
            t.grad = None


@case
def checkpoint_of_one_product_launches_it_once(mesh: DeviceMesh) -> None:
    for name in FAMILIES:
        op = problem(name)
        a, b = (distribute(mesh, t, R) for t in op.operands())
        with count_launches() as launches:
            y = checkpoint(op.overload, a, b, *on_mesh(mesh, op), use_reentrant=False)
            y.full_tensor().sum().backward()
        assert launches == Counter([name, f"{name}_dgrad", f"{name}_wgrad"])


@case
def compiled_block(mesh: DeviceMesh) -> None:
    plain, placed, offs = block_operands(mesh)
    expected = experts_block(*plain, offs)
    grads = torch.autograd.grad(expected.sum(), plain)
    f = torch.compile(experts_block, backend="aot_eager", fullgraph=True)
    y = f(*placed, distribute(mesh, offs, R))
    close(y, expected)
    y.full_tensor().sum().backward()
    for t, d in zip(placed, grads, strict=True):
        close(t.grad, d)


@case
def mixed_with_plain_tensors_is_one_clear_error(mesh: DeviceMesh) -> None:
    op = problem("grouped_mm")
    a, b = op.operands()
    placed = distribute(mesh, a, R), distribute(mesh, b, R)
    for arguments in ((*placed, *op.offs), (a, placed[1], *on_mesh(mesh, op))):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            cake_ops.grouped_mm(*arguments)
    y = cake_ops.grouped_mm(placed[0].to_local(), placed[1].to_local(), *op.offs)
    close(y, op(a, b))


@case
def writing_forms_have_no_rule(mesh: DeviceMesh) -> None:
    op = problem("grouped_mm_wgrad")
    g, x = (distribute(mesh, t.detach(), R) for t in op.operands())
    out = distribute(mesh, torch.zeros(op.result, dtype=op.dtype), R)
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        cake_ops.grouped_mm_wgrad_(out, g, x, *on_mesh(mesh, op))


@case
def fsdp2_gathers_the_weights_around_the_call(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    def model() -> torch.nn.ModuleList:
        torch.manual_seed(1)
        return torch.nn.ModuleList(
            [cake_ops.nn.GroupedLinear(4, 6, 8, bias=True), cake_ops.nn.RouterLinear(6, 3)]
        )

    offs = torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    x = torch.randn(10, 6)
    plain, sharded = model(), model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    for layers in (plain, sharded):
        (layers[0](x, offs).pow(2).sum() + layers[1](x).pow(2).sum()).backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(q, DTensor) and q.placements == (Shard(0),)
        close(q.grad, p.grad)  # the same data on each rank: the mean of equal gradients


# The processes


def worker(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    report: dict[str, str | None] = {}
    for name, check in CASES.items():
        torch.manual_seed(0)  # the same tensors on both ranks
        try:
            check(mesh)
            report[name] = None
        except Exception:  # noqa: BLE001  (reported to the test)
            report[name] = traceback.format_exc()
    (folder / f"report{rank}").write_bytes(pickle.dumps(report))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort the teardown of the interpreter: pytorch/pytorch#179291


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env={**os.environ, **ON_THE_CPU},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        logs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), "\n\n".join(logs)
    return [pickle.loads((folder / f"report{rank}").read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_h62_dtensor(name: str, reports: list[dict[str, str | None]]) -> None:
    for rank, report in enumerate(reports):
        assert report[name] is None, f"rank {rank}:\n{report[name]}"


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
