"""Every schema of the namespace ``cake``, and the record of which function serves each operator.

The schemas are defined in one text so that a reader sees the whole surface at once; only ``with_main_grad``,
which computes nothing, stands where it is used, in :mod:`cake_ops._main_grad`. An operator whose
name ends in ``_out`` writes its result into ``out``; one whose name ends in ``_`` adds to ``out``. Both
are operators of their own and not overloads tagged ``out``: AOTInductor lowers such an overload to a C
shim that does not exist for a Python operator.

An :class:`Op` keeps the *launch* of each device, the function that checks the arguments and computes.
The dispatcher reaches it through the backend key (``CPU``, ``CUDA``); the autograd kernel of
:mod:`cake_ops._autograd` calls it directly when nothing stands between, and :mod:`cake_ops._eager` when a
call is like an earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet

NAMESPACE = "cake"

SCHEMAS = """
grouped_mm(Tensor x, Tensor w, Tensor offs, *, bool deterministic=True) -> Tensor
grouped_mm_out(Tensor x, Tensor w, Tensor offs, *, Tensor(a!) out) -> ()
grouped_mm_dgrad(Tensor g, Tensor w, Tensor offs) -> Tensor
grouped_mm_dgrad_out(Tensor g, Tensor w, Tensor offs, *, Tensor(a!) out) -> ()
grouped_mm_wgrad(Tensor g, Tensor x, Tensor offs, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
grouped_mm_wgrad_out(Tensor g, Tensor x, Tensor offs, *, bool deterministic=True, Tensor(a!) out) -> ()
grouped_mm_wgrad_(Tensor(a!) out, Tensor g, Tensor x, Tensor offs, *, bool deterministic=True) -> ()

router_mm(Tensor x, Tensor w, *, bool deterministic=True) -> Tensor
router_mm_out(Tensor x, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
router_mm_dgrad(Tensor g, Tensor w, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
router_mm_dgrad_out(Tensor g, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
router_mm_wgrad(Tensor g, Tensor x, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
router_mm_wgrad_out(Tensor g, Tensor x, *, bool deterministic=True, Tensor(a!) out) -> ()
router_mm_wgrad_(Tensor(a!) out, Tensor g, Tensor x, *, bool deterministic=True) -> ()
split_bf16x3(Tensor x) -> Tensor

dense_mm(Tensor x, Tensor w, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
dense_mm_out(Tensor x, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
dense_mm_dgrad(Tensor g, Tensor w, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
dense_mm_dgrad_out(Tensor g, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
dense_mm_wgrad(Tensor g, Tensor x, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
dense_mm_wgrad_out(Tensor g, Tensor x, *, bool deterministic=True, Tensor(a!) out) -> ()

batched_mm(Tensor x, Tensor w, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
batched_mm_out(Tensor x, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
batched_mm_dgrad(Tensor g, Tensor w, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
batched_mm_dgrad_out(Tensor g, Tensor w, *, bool deterministic=True, Tensor(a!) out) -> ()
batched_mm_wgrad(Tensor g, Tensor x, *, ScalarType? out_dtype=None, bool deterministic=True) -> Tensor
batched_mm_wgrad_out(Tensor g, Tensor x, *, bool deterministic=True, Tensor(a!) out) -> ()
"""

# The keyset an Autograd kernel sees in plain eager mode: nothing but the backend and its autograd key.
# Every mode, tracer, tensor subclass and transform adds a key.
PLAIN_KEYS = {
    device: DispatchKeySet(getattr(DispatchKey, device))
    | DispatchKeySet(getattr(DispatchKey, f"Autograd{device}"))
    for device in ("CPU", "CUDA")
}
PLAIN = {device: keys.raw_repr() for device, keys in PLAIN_KEYS.items()}


class Direct(NamedTuple):
    """How calls like one are launched, as :mod:`cake_ops._eager` wants to know it.

    Attributes:
        first, last: the numbers of rows for which this holds.
        launch: ``(*tensors) -> result``.
    """

    first: int
    last: int
    launch: Callable[..., Any]


class Op:
    """One operator of the namespace.

    Attributes:
        name: the name without the namespace.
        overload: the ``OpOverload`` to call, to redispatch, and to register rules for.
        launch: the function of each device, keyed by the plain keyset of :data:`PLAIN`, so that one
            dictionary lookup both recognises plain eager mode and finds what to run.
        direct: by the same keys, ``(*tensors, **options) -> Direct | None`` of a call that was served; None is a
            call that ``launch`` alone can serve. A device without one is always served by ``launch``.
        recorded: ``(launch, a, b)`` returns a launch that records its calls for backward; a and b are the first
            two tensors of a call of their geometry that require grad like them.
        explain: for each device, ``(*tensors, **options) -> Explanation`` of such a call, without running it.
        prepare: for each device, ``(out, *tensors) -> (launch, Explanation)`` of a checked call that
            writes ``out``.
        autocasts: the dtypes of operands that autocast casts.
        mutates: whether the operator writes into its argument ``out``.
    """

    __slots__ = (
        "autocasts",
        "direct",
        "explain",
        "launch",
        "mutates",
        "name",
        "overload",
        "prepare",
        "recorded",
    )

    def __init__(self, schema: str) -> None:
        self.name = schema.split("(", 1)[0]
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self.launch: dict[int, Callable[..., Any]] = {}
        self.direct: dict[int, Callable[..., Direct | None]] = {}
        self.recorded: Callable[..., Any] | None = None
        self.explain: dict[str, Callable[..., Any]] = {}
        self.prepare: dict[str, Callable[..., Any]] = {}
        router = self.name.startswith("router")
        self.autocasts = {torch.float16} if router else {torch.float16, torch.float32}
        self.mutates = "(a!)" in schema

    def serve(self, device: str, launch: Callable[..., Any]) -> None:
        """Makes ``launch`` the function that computes this operator on ``device`` (CPU or CUDA)."""
        plain, table = PLAIN[device], self.launch
        table[plain] = launch
        LIB.impl(self.name, lambda *args, **kwargs: table[plain](*args, **kwargs), device)


def _open_library() -> torch.library.Library:
    try:
        return torch.library.Library(NAMESPACE, "DEF")
    except RuntimeError as error:
        raise ImportError(
            f"the operator namespace {NAMESPACE!r} is already registered in this process, so a second"
            f" copy of cake_ops ({__file__}) cannot be loaded beside the first one. Restart Python"
            " with one copy on sys.path."
        ) from error


LIB = _open_library()
OPS: dict[str, Op] = {op.name: op for op in map(Op, filter(None, SCHEMAS.splitlines()))}


def operator_name(op: str | Callable[..., Any]) -> str:
    """The name of an operator given by name, as public function, or as ``torch.ops.cake.<name>``.

    Raises:
        RuntimeError: another function, whatever its name: that of ``cake_ops.functional.grouped_mm`` and of
            torch's own is ``grouped_mm`` too, and they take another weight layout.
    """
    if isinstance(op, str):
        return op
    given = f"{op.__module__}.{op.__qualname__}" if hasattr(op, "__qualname__") else repr(op)
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        given = f"torch.ops.{op}"
        namespace, name = str(op).split(".")[:2]
        if namespace == NAMESPACE:
            return name
    name = getattr(op, "__name__", "")
    if getattr(sys.modules[__package__], name, None) is op:
        return name
    raise RuntimeError(
        "cake_ops: op must be an operator's name, its public function cake_ops.<name> itself, or"
        f" torch.ops.{NAMESPACE}.<name>, got {given}"
    )
