"""Operands in every memory layout, the check of an operator in every form, and that of its refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import reference
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cake_ops

NAN = float("nan")
CANARY = 77.0
BF16, INT32 = torch.bfloat16, torch.int32
E, M, N, K = 3, 10, 40, 24  # of good_arguments


class Pass(TorchDispatchMode):
    """Lets every call pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Place(NamedTuple):
    """Where a GEMM runs and on what: the CPU takes four dtypes, the GPU BF16."""

    device: torch.device
    dtype: torch.dtype


def _sliced(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 5), NAN)
    buffer[..., 2 : 2 + t.shape[-1]] = t
    return buffer[..., 2 : 2 + t.shape[-1]]


def _misaligned(t: Tensor) -> Tensor:
    buffer = t.new_full((t.numel() + 1,), NAN)
    buffer[1:] = t.flatten()
    return buffer[1:].view(t.shape)


def _strided(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape, 2), NAN)
    buffer[..., 0] = t
    return buffer[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": lambda t: t.mT.contiguous().mT,
    "permuted": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": _sliced,
    "misaligned": _misaligned,
    "strided": _strided,
    "rows-expanded": lambda t: t[:1].expand(t.shape),
    "columns-expanded": lambda t: t[..., :1].expand(t.shape),
    "scalar-expanded": lambda t: t.flatten()[:1].view((1,) * t.dim()).expand(t.shape),
}
"""Layouts of a tensor. Memory between its elements is NaN; the expanded ones repeat some of its values."""


def select(name: str, x: Tensor, w: Tensor, g: Tensor, *offs: Tensor) -> tuple[Tensor, ...]:
    """The arguments of the operator ``name`` out of all tensors of its family."""
    if name.endswith("_dgrad"):
        return (g, w, *offs)
    if name.endswith("_wgrad"):
        return (g, x, *offs)
    return (x, w, *offs)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def canary(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, CANARY, dtype=dtype)


def good_arguments(name: str) -> dict[str, Tensor]:
    """The tensors of a right call of the operator ``name``, in any of its forms."""
    family = name.partition("_")[0]
    leading = {"dense": (2,), "batched": (E,)}.get(family, ())
    experts = (E,) if family in ("grouped", "batched") else ()
    x, w, g = zeros(*leading, M, K), zeros(*experts, N, K), zeros(*leading, M, N)
    offs = torch.tensor([3, 3, 8], dtype=INT32)
    names = [argument.name for argument in getattr(torch.ops.cake, name).default._schema.arguments]
    known = {"x": x, "w": w, "g": g, "offs": offs}
    return {name: known[name] for name in names if name in known}


def result_dtypes(name: str, operand: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes a result may have, the default first."""
    if name == "router_mm":
        return (torch.float32,)
    if name.startswith("router_mm"):
        return (torch.float32, torch.bfloat16)
    fixed = name in ("grouped_mm", "grouped_mm_dgrad")
    if fixed or operand in (torch.float32, torch.float64):
        return (operand,)
    return (operand, torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Shape, Frobenius error and largest error, within ``tolerance`` (default: that of the dtype)."""
    assert actual.shape == expected.shape
    bound = reference.tolerance(actual.dtype) if tolerance is None else tolerance
    assert reference.relative_error(actual, expected) <= bound
    assert reference.peak_error(actual, expected) <= bound


@contextmanager
def seen_operators() -> Iterator[list[str]]:
    """Yields the names of the operators that reach the dispatcher while the context is open."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield names


def padded(t: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """A buffer of canaries, and its view that has the values of ``t`` and ``columns`` beside each row."""
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + columns), CANARY)
    view = buffer[..., : t.shape[-1]]
    view.copy_(t)
    return buffer, view


def assert_all_forms(name: str, *tensors: Tensor, tolerance: float | None = None) -> None:
    """The plain form in every result dtype, ``out=`` with and without padding, and accumulation."""
    expected = reference.PRODUCTS[name](*tensors)
    function = getattr(cake_ops, name)
    operator = getattr(torch.ops.cake, name)
    accumulate = getattr(cake_ops, f"{name}_", None)
    assert (accumulate is not None) == (name in ("grouped_mm_wgrad", "router_mm_wgrad"))
    for i, dtype in enumerate(result_dtypes(name, tensors[0].dtype)):
        options = {} if i == 0 else {"out_dtype": dtype}
        result = function(*tensors, **options)
        assert result.dtype == dtype and result.is_contiguous()
        assert result.device == tensors[0].device
        bound = tolerance if dtype == torch.float32 else None
        assert_close(result, expected, bound)
        assert same_bits(operator(*tensors, **options), result)

        out = torch.full_like(result, NAN)
        assert function(*tensors, out=out) is out
        assert same_bits(out, result)
        for columns in (3, 8):
            buffer, view = padded(torch.full_like(result, NAN), columns)
            function(*tensors, out=view)
            assert_close(view, expected, bound)
            assert (buffer[..., result.shape[-1] :] == CANARY).all()

        if accumulate is None:
            continue
        start = torch.randn_like(result)
        for columns in (0, 3):
            buffer, view = padded(start, columns)
            assert accumulate(view, *tensors) is view
            assert_close(view, expected + start.double(), bound)
            assert (buffer[..., result.shape[-1] :] == CANARY).all()


def assert_refused_alike(
    message: str, call: Callable[..., Any], tensors: tuple[Tensor, ...]
) -> None:
    """``call(*tensors)`` raises the same error for real tensors, meta tensors and fake tensors."""

    def on_meta(t: Tensor) -> Tensor:
        twin = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return twin.requires_grad_(t.requires_grad)

    exactly = f"^{re.escape(message)}$"
    with pytest.raises(RuntimeError, match=exactly):
        call(*tensors)
    with pytest.raises(RuntimeError, match=exactly):
        call(*map(on_meta, tensors))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        with pytest.raises(RuntimeError, match=exactly):
            call(*fakes)
