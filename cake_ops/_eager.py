"""The eager fast path: a call like one that was seen before goes straight to its launch.

The dispatcher and a key of the call's geometry cost a Python operator more than its launch. Both answer one
question: are these tensors, in this thread, like those of an earlier call? ``TensorGuards``, by which
torch.compile recognises the calls of compiled code, answers it in 0.2 us: it compares types, dispatch keys with
those that modes, transforms, autocast and tracers add in this thread, dtypes, devices, sizes, strides and
``requires_grad``. Asked beside it is what it leaves out: torch function modes, tracers that count as
infrastructure, forward-mode differentiation, a running profiler, which wants the dispatcher's event, and the
alignment of the operands. Every other call takes the dispatcher, and is remembered if all that the
dispatcher would have found is a plain operand on one device.

Served are the forms that return a new tensor, with ``deterministic`` left alone; ``torch.ops.cake.*`` is the
dispatcher as ever.
"""

from __future__ import annotations

import sys
import threading
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
    _len_torch_dispatch_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ._library import OPS, PLAIN_KEYS, Direct, Op

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch whose compiler recognises calls in another way
    TensorGuards = None

MAX_KNOWN = 32  # calls of an operator whose b has one last size,
MAX_SIZES = 256  # and such sizes

_OPERANDS = (Tensor, Parameter)


def _plain_keys() -> dict[int, int]:
    """The keys that the dispatcher finds in plain eager mode, and the key of the launch that serves them.

    There may be fallthroughs beside the keys of PLAIN, and no autograd in inference mode or for its tensors.
    """
    select, inplace = (
        DispatchKeySet(k) for k in (DispatchKey.BackendSelect, DispatchKey.ADInplaceOrView)
    )
    launch = {}
    for device, keys in PLAIN_KEYS.items():
        backend = DispatchKeySet(getattr(DispatchKey, device))
        for found in (keys | inplace, backend | inplace, backend):
            launch[(found | select).raw_repr()] = keys.raw_repr()
    return launch


_PLAIN = _plain_keys()
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


class _Known(NamedTuple):
    """A call that was seen: its rows, what recognises it, its launch and, if an operand requires grad, what
    records it for backward."""

    first: int
    last: int
    check: Callable[..., bool]
    launch: Callable[..., Tensor]
    record: Callable[..., Tensor] | None


_Table = dict[int, tuple[_Known, ...]]  # by the last size of b

_lock = threading.Lock()
_tables: list[_Table] = []
_epoch = 0


def forget_calls() -> None:
    """Makes every call take the dispatcher once more, since what serves it may have changed."""
    global _epoch
    with _lock:
        _epoch += 1
        for table in _tables:
            table.clear()


@cache
def eager(name: str, **options: Any) -> Callable[..., Tensor]:
    """The operator ``name`` with ``options``, as a function of its tensors, which gives what its overload gives.

    The first tensor has rows, and in a weight gradient the second one as many. Their number may differ from call
    to call.
    """
    op = OPS[name]
    overload = partial(op.overload, **options) if options else op.overload
    b_has_rows = name.endswith("_wgrad")
    table: _Table = {}
    _tables.append(table)

    def call(*tensors: Tensor) -> Tensor:
        if (
            is_dynamo_compiling()
            or _len_torch_dispatch_stack()
            or _is_torch_function_mode_enabled()
            or _profiler_enabled()
            or forward_ad._current_level >= 0
        ):
            return overload(*tensors)
        a, b = tensors[0], tensors[1]
        if type(a) not in _OPERANDS or type(b) not in _OPERANDS:
            return overload(*tensors)
        try:
            rows, columns = a.shape[0], b.shape[-1]
            unaligned = (a.data_ptr() | b.data_ptr()) & 15
        except (IndexError, RuntimeError):  # no size or no address
            return overload(*tensors)
        if unaligned or (b_has_rows and b.shape[0] != rows):
            return overload(*tensors)
        for first, last, check, launch, record in table.get(columns, ()):
            if first <= rows <= last and check(*tensors):
                if record is not None and is_grad_enabled():
                    return record(launch, *tensors)
                return launch(*tensors)
        epoch = _epoch
        result = overload(*tensors)
        _remember(op, options, table, tensors, b_has_rows, epoch)
        return result

    return call


def by_out_dtype(name: str) -> dict[torch.dtype | None, Callable[..., Tensor]]:
    """The operator ``name`` for each ``out_dtype`` that a GPU's kernels have."""
    dtypes = torch.float32, torch.bfloat16
    return {None: eager(name), **{dtype: eager(name, out_dtype=dtype) for dtype in dtypes}}


def _remember(
    op: Op,
    options: dict[str, Any],
    table: _Table,
    tensors: tuple[Tensor, ...],
    b_has_rows: bool,
    epoch: int,
) -> None:
    """Remembers a call that was served, if it was plain and one can be launched without the dispatcher."""
    plain = _launch_key(op, tensors)
    if plain is None:
        return
    direct = op.direct.get(plain)
    if direct:
        how = direct(*tensors, **options)
    else:
        how = Direct(0, sys.maxsize, partial(op.launch[plain], **options))
    if how is None:
        return
    sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
    sizes[0][0] = None
    if b_has_rows:
        sizes[1][0] = None
    guards = TensorGuards(
        *tensors,
        dynamic_dims_sizes=sizes,
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )
    requires_grad = tensors[0].requires_grad or tensors[1].requires_grad
    columns = tensors[1].shape[-1]
    with _lock:
        if epoch == _epoch:
            if len(table) >= MAX_SIZES:
                table.clear()
            record = op.record if requires_grad else None
            known = _Known(how.first, how.last, guards.check, how.launch, record)
            table[columns] = (known, *table.get(columns, ())[: MAX_KNOWN - 1])


def _launch_key(op: Op, tensors: tuple[Tensor, ...]) -> int | None:
    """The key of the launch that the dispatcher finds for a plain call of this thread, else None."""
    if TensorGuards is None or not all(type(t) in _OPERANDS for t in tensors):
        return None
    keys = _dispatch_tls_local_include_set()
    for t in tensors:
        keys |= _dispatch_keys(t)
    if not any(t.dtype in op.autocasts for t in tensors):
        keys -= _AUTOCAST
    return _PLAIN.get((keys - _dispatch_tls_local_exclude_set()).raw_repr())
