"""The eager fast path: a call like one that was seen before goes straight to its launch.

The dispatcher and a key of the call's geometry cost a Python operator more than its launch. Both answer one
question: are these tensors, in this thread, like those of an earlier call? ``TensorGuards``, by which
torch.compile recognises the calls of compiled code, answers it in 0.2 us: it compares types, dispatch keys with
those that transforms, autocast and tracers add in this thread, dtypes, devices, sizes, strides and
``requires_grad``. Asked beside it is what it leaves out: modes, tracers that count as infrastructure,
forward-mode differentiation, a running profiler, which wants the dispatcher's event, and the alignment of the
operands. Every other call takes the dispatcher, and is remembered: with its launch, if all that the dispatcher
found is plain operands on one device, else as one for the dispatcher.

Served are the forms that return a new tensor, with ``deterministic`` left alone; ``torch.ops.cake.*`` is the
dispatcher as ever. What is known of a call is what held when it was made: kernels that somebody registers for
these operators later, from outside, are not seen by it, nor does a lone ``ExecutionTraceObserver`` see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_keys,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ._library import OPS, PLAIN_KEYS, Direct, Op

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch whose compiler recognises calls in another way
    TensorGuards = None

MAX_KNOWN = 16  # calls in an entry of a table,
MAX_SIZES = 64  # and entries, so that no more plans live than the routes' bound

_OPERANDS = (Tensor, Parameter)


def _plain_keys() -> dict[int, tuple[int, bool]]:
    """The keys that the dispatcher finds in plain eager mode -> the key of the launch that serves them, and whether
    there is autograd above it. There is none in inference mode, below autograd, and for inference tensors."""
    select, inplace = (
        DispatchKeySet(k) for k in (DispatchKey.BackendSelect, DispatchKey.ADInplaceOrView)
    )
    found = {}
    for device, keys in PLAIN_KEYS.items():
        backend = DispatchKeySet(getattr(DispatchKey, device))
        for plain, records in (
            (keys | inplace, True),
            (backend | inplace, False),
            (backend, False),
        ):
            found[(plain | select).raw_repr()] = keys.raw_repr(), records
    return found


_PLAIN = _plain_keys()
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


class _Known(NamedTuple):
    """A call that was seen: its rows, what recognises it, its launch and, where it is recorded for backward, the
    launch that does so."""

    first: int
    last: int
    check: Callable[..., bool]
    launch: Callable[..., Tensor]
    record: Callable[..., Tensor] | None


_Table = dict[int, tuple[_Known, ...]]  # by the last size of b and the bits of the rows

_tables: list[list[_Table]] = []  # each in a list of its own, in which it is exchanged


def forget_calls() -> None:
    """Makes every call take the dispatcher once more, since what serves it may have changed.

    No lock: a call under way fills a table that nobody reads any more.
    """
    for current in _tables:
        current[0] = {}


@cache
def eager(name: str, **options: Any) -> Callable[..., Tensor]:
    """The operator ``name`` with ``options``, as a function of its tensors, which gives what its overload gives.

    The first tensor has rows, and in a weight gradient the second one as many. Their number may differ from call
    to call.
    """
    op = OPS[name]
    overload = partial(op.overload, **options) if options else op.overload
    b_has_rows = name.endswith("_wgrad")
    current: list[_Table] = [{}]
    _tables.append(current)

    def call(*tensors: Tensor) -> Tensor:
        if (
            is_dynamo_compiling()
            or _len_torch_dispatch_stack()
            or _is_torch_function_mode_enabled()
            or _is_tracing()  # by torch.jit, for which sizes are tensors
            or profiler._is_profiler_enabled  # of all threads
            or _profiler_enabled()
            or forward_ad._current_level >= 0
        ):
            return overload(*tensors)
        a, b = tensors[0], tensors[1]
        # The guards refuse a tensor that comes twice.
        if a is b or type(a) not in _OPERANDS or type(b) not in _OPERANDS:
            return overload(*tensors)
        try:
            rows, columns = a.shape[0], b.shape[-1]
            unaligned = (a.data_ptr() | b.data_ptr()) & 15
        except (IndexError, RuntimeError):  # no size or no address
            return overload(*tensors)
        if unaligned or (b_has_rows and b.shape[0] != rows):
            return overload(*tensors)
        table = current[0]
        key = columns << 6 | rows.bit_length()
        for first, last, check, launch, record in table.get(key, ()):
            if first <= rows <= last and check(*tensors):
                if record is not None and is_grad_enabled():
                    return record(*tensors)
                return launch(*tensors)
        result = overload(*tensors)
        known = _known(op, options, overload, tensors, b_has_rows)
        if known is not None:
            if len(table) >= MAX_SIZES and key not in table:
                table.clear()
            table[key] = (known, *table.get(key, ())[: MAX_KNOWN - 1])
        return result

    return call


def by_out_dtype(name: str) -> Callable[[torch.dtype | None], Callable[..., Tensor]]:
    """Finds the operator ``name`` with an ``out_dtype`` as a function of its tensors."""
    dtypes = torch.float32, torch.bfloat16  # those that a GPU's kernels have
    served = {None: eager(name), **{dtype: eager(name, out_dtype=dtype) for dtype in dtypes}}
    overload = OPS[name].overload

    def find(out_dtype: torch.dtype | None) -> Callable[..., Tensor]:
        if out_dtype is None or out_dtype in dtypes:
            return served[out_dtype]
        return partial(overload, out_dtype=out_dtype)

    return find


def _known(
    op: Op,
    options: dict[str, Any],
    overload: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    b_has_rows: bool,
) -> _Known | None:
    """How a call that the dispatcher served is to be served from now on; None if it cannot be recognised."""
    if TensorGuards is None or not all(type(t) in _OPERANDS for t in tensors):
        return None
    plain, records = _PLAIN.get(_keys(op, tensors), (None, False))
    how: Direct | None = None
    if plain in op.direct:
        how = op.direct[plain](*tensors, **options)
    elif plain is not None:
        how = Direct(0, sys.maxsize, partial(op.launch[plain], **options))
    if how is None:
        how, records = Direct(0, sys.maxsize, overload), False
    has_rows = (True, b_has_rows, *(False for _ in tensors[2:]))
    requires_grad = tensors[0].requires_grad or tensors[1].requires_grad
    record = op.recorded(how.launch, *tensors[:2]) if records and requires_grad else None
    return _Known(how.first, how.last, recogniser(tensors, has_rows), how.launch, record)


def recogniser(tensors: tuple[Tensor, ...], has_rows: tuple[bool, ...]) -> Callable[..., bool]:
    """What tells whether other tensors are like these, in this thread. The first size of those that have rows may
    differ; whether all have as many is not asked. One that comes twice is never recognised."""
    sizes = [
        [None, *t.shape[1:]] if has else list(t.shape)
        for t, has in zip(tensors, has_rows, strict=True)
    ]
    strides = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _keys(op: Op, tensors: tuple[Tensor, ...]) -> int:
    """The keys that the dispatcher finds in this thread; autocast is none where it has nothing to cast."""
    keys = _dispatch_tls_local_include_set()
    for t in tensors:
        keys |= _dispatch_keys(t)
    if not any(t.dtype in op.autocasts for t in tensors):
        keys -= _AUTOCAST
    return (keys - _dispatch_tls_local_exclude_set()).raw_repr()
