"""Memory around and beneath the grouped kernels: what they may touch, layouts, offsets, sizes beyond 2^31.

A test called after a case (h05, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import random

import pytest
import torch
from forms import CANARY, LAYOUTS, NAN
from gpu import (
    BF16,
    DEVICE,
    GROUPED_PRODUCTS,
    Problem,
    assert_borders,
    bordered,
    check,
    check_all,
    problem,
    wait,
)

import cake_ops
from cake_ops.cuda import grouped_mm

pytestmark = pytest.mark.gpu


def test_h05_groups_without_rows_do_not_hang() -> None:
    """200 weight gradients each, in the time that :func:`wait` allows."""
    for sizes in ([8, 0, 8, 0, 8, 0, 8, 0], [0, 8, 8], [8, 8, 0], [0] * 8):
        p = problem(sizes, 64, 72)
        for _ in range(200):
            dw = p.run("grouped_mm_wgrad")
        check(dw, p.expected("grouped_mm_wgrad"))


def test_h08_operands_that_end_where_their_memory_ends() -> None:
    """Allocations of 12 MiB to the byte; the last group is empty, the one before has an odd start."""
    p = problem([1, 6000, 143, 0], 1024, 1024)
    assert p.x.nbytes == p.g.nbytes == 12 << 20
    check_all(p)
    check(p.run("grouped_mm_wgrad", out_dtype=torch.float32), p.expected("grouped_mm_wgrad"))


@pytest.mark.parametrize("k", [64, 72, 200])
@pytest.mark.parametrize("n", [8, 72, 128, 136, 200])
@pytest.mark.parametrize("name", GROUPED_PRODUCTS)
def test_h19_nothing_is_written_beside_the_result(name: str, n: int, k: int) -> None:
    p = problem([97, 0, 64, 1, 138], n, k)
    expected = p.expected(name)
    buffer, out = bordered(expected.shape, BF16)
    launch = cake_ops.prepare(name, *p.tensors(name), out=out).launch
    out.fill_(NAN)
    first = launch().clone()
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(50):
        out.fill_(NAN)
        differs |= (launch() != first).any()
    check(first, expected)
    assert not differs
    assert_borders(buffer)


INT32 = torch.iinfo(torch.int32)
RANDOM = random.Random(0)
BAD_ENDS = {
    "decreasing": [40, 20, 60, 10],
    "negative": [-5, -1, 30, 100],
    "past-the-rows": [10, 1000, 64, 100],
    "extremes": [INT32.max, INT32.min, INT32.max, INT32.min],
    "300-random": [RANDOM.randrange(INT32.min, INT32.max) for _ in range(300)],
    "300-small": [RANDOM.randrange(-50, 150) for _ in range(300)],
}


@pytest.mark.parametrize("ends", BAD_ENDS.values(), ids=BAD_ENDS)
@pytest.mark.parametrize("name", [*GROUPED_PRODUCTS, "grouped_mm_wgrad_"])
def test_bad_offsets_harm_nothing(name: str, ends: list[int]) -> None:
    """Ends are clamped to [0, M] and to the end before them, as tile_scheduler.cuh says."""
    p = problem([100] + [0] * (len(ends) - 1), 72, 136)
    p.offs.copy_(torch.tensor(ends, dtype=torch.int32))
    product = name.rstrip("_")
    tensors = p.tensors(product)
    used = p._replace(offs=p.offs.clamp(0, 100).cummax(0).values.int())
    expected = used.expected(product)
    buffer, out = bordered(expected.shape, BF16)
    if name == "grouped_mm_wgrad_":
        out.copy_(p.w)
        cake_ops.grouped_mm_wgrad_(out, *tensors)
        check(out, expected + p.w.double())
    else:
        out.fill_(NAN)
        getattr(cake_ops, name)(*tensors, out=out)
        check(out, expected)
    assert_borders(buffer)
    check_all(problem([60, 0, 40, 3], 72, 136))


@pytest.mark.parametrize("form", ["", "_out", "_"])
def test_check_offs_names_the_group(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    p = problem([10, 0, 80, 10], 72, 136)
    p.offs[2] = 3
    out = torch.full((4, 72, 136), CANARY, device=DEVICE, dtype=BF16)
    call = {
        "": lambda: p.run("grouped_mm_wgrad"),
        "_out": lambda: p.run("grouped_mm_wgrad", out=out),
        "_": lambda: cake_ops.grouped_mm_wgrad_(out, p.g, p.x, p.offs),
    }[form]
    monkeypatch.setattr(grouped_mm, "CHECK_OFFS", True)
    cake_ops.clear_caches()  # a known call would not be checked again
    with pytest.raises(RuntimeError, match=f"wgrad{form}: .*group 2 ends at 3, .* it at 10"):
        call()
    assert (out == CANARY).all()
    p.offs[2] = 90
    call()


@pytest.mark.parametrize(
    "name, options",
    [(name, {}) for name in GROUPED_PRODUCTS]
    + [("grouped_mm_wgrad", {"out_dtype": torch.float32})],
    ids=[*GROUPED_PRODUCTS, "grouped_mm_wgrad-fp32"],
)
def test_padded_rows_are_read_and_written_in_place(
    name: str, options: dict[str, torch.dtype]
) -> None:
    """NaN lies between the rows of the operands, canaries between those of the result."""
    p = problem([97, 0, 64, 1, 138], 136, 200)
    tensors = []
    for t in p.tensors(name)[:2]:
        tensors.append(bordered(t.shape, BF16, NAN)[1].copy_(t))
    expected = p.expected(name)
    assert cake_ops.explain(name, *tensors, p.offs, **options).path == "kernel"
    check(getattr(cake_ops, name)(*tensors, p.offs, **options), expected)
    buffer, out = bordered(expected.shape, options.get("out_dtype", BF16))
    check(cake_ops.prepare(name, *tensors, p.offs, out=out, **options).launch(), expected)
    assert_borders(buffer)


@pytest.mark.parametrize("name", GROUPED_PRODUCTS)
def test_misaligned_operands_are_copied(name: str) -> None:
    p = problem([97, 0, 64, 1], 72, 136)
    a, b, offs = p.tensors(name)
    off = LAYOUTS["misaligned"]
    expected = p.expected(name)
    out = off(torch.full(expected.shape, NAN, device=DEVICE, dtype=BF16))
    for first, second in ((off(a), b), (a, off(b)), (off(a), off(b))):
        assert first.data_ptr() % 16 or second.data_ptr() % 16
        assert cake_ops.explain(name, first, second, offs).path == "kernel after a copy"
        check(getattr(cake_ops, name)(first, second, offs), expected)
        check(getattr(cake_ops, name)(first, second, offs, out=out.fill_(NAN)), expected)


def test_h23_h24_activations_beyond_2_to_the_31_elements() -> None:
    """M K > 2^31 as operand (fwd, wgrad) and as result (dgrad): 9 GB. Element 2^31 is row 524288."""
    sizes = [100, *[37000] * 13, 43038, 157, 249]
    assert sum(sizes) == 524288 + 256 and sum(sizes[:15]) < 524288 < sum(sizes[:16])
    p = problem(sizes, 256, 4096)
    ends = p.offs.tolist()
    for name in GROUPED_PRODUCTS[:2]:
        result = p.run(name)
        wait()
        for e in (0, 15, 16):
            rows = slice(0 if e == 0 else ends[e - 1], ends[e])
            one = Problem(p.x[rows], p.w[e : e + 1], p.g[rows], p.offs.new_tensor([sizes[e]]))
            check(result[rows], one.expected(name))
        del result
    for dtype in (BF16, torch.float32):
        dw = p.run("grouped_mm_wgrad", out_dtype=dtype)
        for e in (0, 15, 16):
            rows = slice(0 if e == 0 else ends[e - 1], ends[e])
            check(dw[e], p.g[rows].double().t() @ p.x[rows].double())


def test_h24_weights_beyond_2_to_the_31_elements() -> None:
    """E N K > 2^31 as operand (fwd, dgrad) and as result (wgrad): 10 GB."""
    p = problem([3, 0, 1, 2, 0, 1, 5, 0, 7], 16384, 16384, tail=2)
    assert p.w.numel() > 2**31
    for name in GROUPED_PRODUCTS[:2]:
        check(p.run(name), p.expected(name))
    dw = p.run("grouped_mm_wgrad")
    wait()
    for e in (0, 1, 8):
        begin, end = ([0, *p.offs.tolist()])[e : e + 2]
        check(dw[e], p.g[begin:end].double().t() @ p.x[begin:end].double())
