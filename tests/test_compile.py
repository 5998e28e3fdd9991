"""torch.compile with full graphs: values, shapes that change, checkpoints, mutation, the disk cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from families import OPERATORS, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cake_ops
from cake_ops.testing import count_launches

BACKENDS = ("eager", "aot_eager", "inductor")
OFFS = problem("grouped_mm").offs[0]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing from an earlier test or, through the cache on disk, from an earlier state of the package.

    One thread: a pool of compiler processes takes longer to start than these graphs to compile.
    """
    torch._dynamo.reset()
    with (
        torch.compiler.config.patch(force_disable_caches=True),
        torch._inductor.config.patch(compile_threads=1),
    ):
        yield


def with_gradients(f: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    y = f(*leaves)
    return (y, *torch.autograd.grad(y.float().pow(2).sum(), leaves))


def compiled(
    f: Callable[..., Any], backend: str = "aot_eager", **options: Any
) -> Callable[..., Any]:
    return torch.compile(f, backend=backend, fullgraph=True, **options)


# Values


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operator_in_one_graph(backend: str) -> None:
    """All products and their gradients; one compilation, since inductor takes seconds for each."""
    problems = [problem(name) for name in OPERATORS]
    leaves = [t for op in problems for t in op.operands()]

    def f(*leaves: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(problems, leaves[::2], leaves[1::2], strict=True)
        return tuple(op(a, b) for op, a, b in pairs)

    counter = CompileCounterWithBackend(backend)
    results = []
    with count_launches() as launches:
        for g in (f, compiled(f, counter)):
            y = g(*leaves)
            results.append((*y, *torch.autograd.grad(y, leaves, [2 * t.detach() for t in y])))
    assert all(map(torch.equal, *results))
    assert counter.frame_count == 1
    assert sum(launches.values()) == 2 * 3 * len(OPERATORS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_h47_tokens_change_without_recompilation(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    def f(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return cake_ops.grouped_mm(x, w, offs)

    step = compiled(f, counter)
    w = torch.randn(3, 5, 6, requires_grad=True)
    graphs = []
    for rows in (100, 101, 257, 1024, 0, 1):
        for _ in range(2):  # other values of offs
            x = torch.randn(rows, 6, requires_grad=True)
            offs = torch.randint(rows + 1, (3,)).sort().values.int()
            torch.testing.assert_close(
                with_gradients(partial(step, offs=offs), x, w),
                with_gradients(partial(f, offs=offs), x, w),
            )
        graphs.append(counter.frame_count)
    # One static and one dynamic graph; torch always specialises the sizes 0 and 1.
    assert graphs == [1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("name", OPERATORS)
def test_dynamic_and_unbacked_rows(name: str) -> None:
    op = problem(name)
    rows = 1 if name.startswith("batched") else 0
    varying = 2 if name.endswith("_wgrad") else 1  # in how many operands the rows (M) appear

    def step(a: Tensor, b: Tensor) -> Tensor:
        return op(a * 2, b)

    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        f = compiled(step, counter)
        for extra in (0, 1, 7):
            a, b = op.operands()
            operands = [a, b]
            for i in range(varying):
                padding = operands[i].narrow(rows, 0, 1).repeat_interleave(extra, rows)
                operands[i] = torch.cat([operands[i], padding], rows).detach().requires_grad_()
                mark(operands[i], rows)
            torch.testing.assert_close(
                with_gradients(f, *operands), with_gradients(step, *operands)
            )
        assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_rows_from_data(backend: str) -> None:
    """M is an unbacked size that an ``item()`` in the graph made."""

    def f(a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        rows = n.item()
        torch._check(rows >= 0)
        torch._check(rows <= a.shape[0])
        return cake_ops.grouped_mm(a[:rows], b, OFFS.clamp(max=rows))

    counter = CompileCounterWithBackend(backend)
    g = compiled(f, counter)
    a, b = problem("grouped_mm").operands()
    for rows in map(torch.tensor, (9, 8, 10, 0, 1)):
        torch.testing.assert_close(
            with_gradients(partial(g, n=rows), a, b),
            with_gradients(partial(f, n=rows), a, b),
        )
    assert counter.frame_count == 1


def test_bad_call_raises_the_same_error() -> None:
    x, w = torch.randn(10, 6), torch.randn(3, 5, 7)
    with pytest.raises(RuntimeError, match="w must have shape") as eager:
        cake_ops.grouped_mm(x, w, OFFS)
    with pytest.raises(RuntimeError) as traced:
        compiled(cake_ops.grouped_mm)(x, w, OFFS)
    assert str(eager.value) in str(traced.value)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_h46_operand_made_in_the_graph(backend: str) -> None:
    def transposed_and_cast(x: Tensor, w: Tensor) -> Tensor:
        return cake_ops.grouped_mm(x, w.transpose(1, 2).double(), OFFS)

    def concatenated(x: Tensor, w: Tensor) -> Tensor:
        return cake_ops.grouped_mm(x, torch.cat([w, w + 1], 2).double().mT, OFFS)

    def padded(x: Tensor, w: Tensor) -> Tensor:
        return cake_ops.grouped_mm(F.pad(x, (0, 1)), F.pad(w.mT, (0, 1, 0, 3)).double(), OFFS)

    def sliced(x: Tensor, w: Tensor) -> Tensor:
        return cake_ops.grouped_mm((2 * x)[:, 1:], w[:, 1:].mT.double(), OFFS)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([g(x, w) for g in (transposed_and_cast, concatenated, padded, sliced)], 1)

    x = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 6, 5, requires_grad=True)
    torch.testing.assert_close(with_gradients(compiled(f, backend), x, w), with_gradients(f, x, w))


@pytest.mark.parametrize("backend", BACKENDS)
def test_h50_autocast_in_the_graph(backend: str) -> None:
    def f(x: Tensor, w: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cake_ops.grouped_mm(x, w, OFFS), cake_ops.router_mm(x, gate)

    leaves = [torch.randn(s, requires_grad=True) for s in ((10, 6), (3, 5, 6), (4, 6))]
    results = []
    for g in (compiled(f, backend), f):
        y, logits = g(*leaves)
        assert (y.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        results.append((y, logits, *torch.autograd.grad(y.sum() + logits.sum(), leaves)))
    assert all(t.dtype == torch.float32 for t in results[0][2:])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_h37_change_of_a_saved_tensor_is_noticed(backend: str) -> None:
    w = torch.randn(3, 5, 6, requires_grad=True)
    x = torch.randn(10, 6, requires_grad=True) * 1
    y = compiled(cake_ops.grouped_mm, backend)(x, w, OFFS)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Checkpoints


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, h = cake_ops.grouped_mm(x, up, OFFS).chunk(2, -1)
    return cake_ops.grouped_mm(F.silu(gate) * h, down, OFFS)


def keep(policy: CheckpointPolicy, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    grouped = func is torch.ops.cake.grouped_mm.default
    return policy if grouped else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(None, 3), (CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.MUST_RECOMPUTE, 3)],
    ids=["all", "must-save", "must-recompute"],
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpoint_in_the_graph(
    backend: str, policy: CheckpointPolicy | None, forwards: int
) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        decide = partial(keep, policy)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, decide)
    leaves = [
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((10, 6), (3, 10, 6), (3, 6, 5))
    ]
    f = compiled(lambda *args: checkpoint(block, *args, **options), backend)
    f(*leaves)  # compiles
    with count_launches() as launches:
        actual = with_gradients(f, *leaves)
    expected = Counter(grouped_mm=forwards, grouped_mm_dgrad=2, grouped_mm_wgrad=2)
    assert launches == expected  # the product that nobody needs again is dead code in the backward
    torch.testing.assert_close(actual, with_gradients(block, *leaves))


def test_checkpoint_around_a_compiled_block() -> None:
    """A compiled graph saves after it ran, so nothing in it can be skipped; torch.mm fares the same."""
    leaves = [torch.randn(s, requires_grad=True) for s in ((10, 6), (3, 10, 6), (3, 6, 5))]
    f = compiled(block)
    f(*leaves)
    with count_launches() as launches:
        checkpoint(f, *leaves, use_reentrant=False).sum().backward()
    assert launches["grouped_mm"] == 4


# Mutation


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulation_into_a_buffer(backend: str) -> None:
    def f(main_grad: Tensor, router_grad: Tensor, g: Tensor, x: Tensor) -> Tensor:
        cake_ops.grouped_mm_wgrad_(main_grad, 2 * g, x, OFFS)
        cake_ops.router_mm_wgrad_(router_grad, g, x)
        y = torch.empty(10, 5)
        cake_ops.grouped_mm(x, main_grad + 1, OFFS, out=y)
        return y + main_grad.sum() + router_grad.sum()

    buffers = [torch.zeros(3, 5, 6), torch.zeros(5, 6)]
    expected = [t.clone() for t in buffers]
    g, x = torch.randn(10, 5), torch.randn(10, 6)
    step = compiled(f, backend)
    for _ in range(2):
        torch.testing.assert_close(step(*buffers, g, x), f(*expected, g, x))
        torch.testing.assert_close(buffers, expected)
    with count_launches() as launches:
        step(*buffers, g, x)
    assert launches == Counter(grouped_mm_wgrad_=1, router_mm_wgrad_=1, grouped_mm_out=1)


def test_inductor_accumulates_in_place() -> None:
    from torch._inductor.utils import run_and_get_code

    def f(main_grad: Tensor, g: Tensor, x: Tensor) -> None:
        cake_ops.grouped_mm_wgrad_(main_grad, g, x, OFFS)

    arguments = torch.zeros(3, 5, 6), torch.randn(10, 5), torch.randn(10, 6)
    _, (code,) = run_and_get_code(compiled(f, "inductor"), *arguments)
    call = code[code.index("def call") :]
    assert "grouped_mm_wgrad_.default(arg0_1, " in call
    assert "empty_strided" not in call  # no copy of the buffer


# The cache on disk

USE = """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    import cake_ops_copy as cake_ops
    from torch._dynamo.utils import counters
    def gradient():
        torch._dynamo.reset()
        counters.clear()
        x, w = torch.ones(4, 3, requires_grad=True), torch.ones(2, 5, 3, requires_grad=True)
        offs = torch.tensor([1, 4], dtype=torch.int32)
        y = torch.compile(cake_ops.grouped_mm, fullgraph=True)(x, w, offs)
        y.sum().backward()
        return x.grad[0, 0].item(), counters["aot_autograd"]["autograd_cache_hit"]
    print(*gradient())
    torch.compiler.config.cache_key_tag = f"cake_ops {cake_ops.__version__}"
    print(*gradient())
"""

CHANGE = """
    def differentiable(name, grad_a, grad_b, *, register=differentiable, **options):
        changed = (lambda *args: 7 * grad_a(*args)) if name == "grouped_mm" else grad_a
        register(name, changed, grad_b, **options)
"""


def copy_package(folder: Path) -> Path:
    copy = folder / "cake_ops_copy"  # a name that no installed package has
    shutil.copytree(Path(cake_ops.__file__).parent, copy, ignore=shutil.ignore_patterns("kernels"))
    shutil.copytree(Path(cake_ops.meta.__file__).parent, copy / "meta", dirs_exist_ok=True)
    return copy


@pytest.mark.slow
def test_h48_cache_on_disk_and_a_new_version_of_the_package(tmp_path: Path) -> None:
    """AOTAutograd's cache is keyed by the forward graph, which names operators and not their formulas.

    So after an update of cake_ops that changes a *formula* (a changed kernel or check is always taken up)
    torch may use the backward graph of the old one. The remedy is torch's ``cache_key_tag``
    (``TORCH_COMPILE_CACHE_KEY_TAG``) set to the version, or an emptied ``TORCHINDUCTOR_CACHE_DIR``.
    """
    old, new = copy_package(tmp_path / "old"), copy_package(tmp_path / "new")
    with (new / "_autograd.py").open("a") as file:
        file.write(textwrap.dedent(CHANGE))
    init = (new / "__init__.py").read_text()
    (new / "__init__.py").write_text(
        init.replace(f'__version__ = "{cake_ops.__version__}"', '__version__ = "999"')
    )

    def run(package: Path) -> list[list[float]]:
        done = subprocess.run(
            [sys.executable, "-I", "-c", textwrap.dedent(USE), str(package.parent)],
            check=False,
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]

    assert run(old) == [[5, 0], [5, 0]]
    untagged, tagged = run(new)
    assert untagged in ([5, 1], [35, 0])  # what torch does today: a hit, and the old formula
    assert tagged == [35, 0]
