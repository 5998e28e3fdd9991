"""How every operator is differentiated: one mechanism that saves for backward *before* it launches.

``torch.autograd.Function`` packs its saved tensors after ``forward`` has run. Under a non-reentrant
``torch.utils.checkpoint`` the last pack of the recomputation raises "stop" (early stop), so for such a
function the recomputed GEMM has already run when nobody needs it any more; a built-in operator packs
first and skips it. The order can be seen only through default saved-tensor hooks. So when a pair of them
is active, this kernel calls the pack hook itself before the launch, and hands autograd the packed objects
when it asks for them afterwards. Without hooks the plain order is used, and nothing is paid.

All matrix products here are bilinear in two operands ``a`` and ``b``: the gradient of ``a`` needs ``b``
and the other way round. An operand is saved only if the other one needs a gradient, so a frozen weight
does not keep the activations alive. The gradients are operators of the same families, hence double
backward, ``torch.compile``, dispatch modes and checkpointing see them as they see any operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
    _will_engine_execute_node,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks as pop_hooks,
)
from torch._C._autograd import (
    _push_saved_tensors_default_hooks as push_hooks,
)
from torch._C._autograd import (
    _top_saved_tensors_default_hooks as top_hooks,
)
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import Function, _SingleLevelFunction

from ._library import LIB, OPS, Op
from ._main_grad import main_grad_of


class Call(NamedTuple):
    """What a gradient formula may know of the forward call besides the tensors."""

    options: dict[str, Any]
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    b_stride: tuple[int, ...]
    main_grad: Tensor | None
    """Where the gradient of ``b`` is to be added, if it is not wanted on its own."""

    @property
    def b_transposed(self) -> bool:
        """Whether ``b`` is stored column-major. A weight gradient is then made in that memory order, so
        that ``AccumulateGrad`` adopts it without a copy."""
        row, column = self.b_stride[-2:]  # a symbolic stride is not 1, and is not asked
        return type(row) is int and row == 1 and not (type(column) is int and column == 1)


Gradient = Callable[..., Tensor | None]
"""``(call, g, other operand, *offs) -> gradient``, written with differentiable operators. None if it was
added to ``call.main_grad``."""


def _redispatch(op: Op, keyset: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    with _AutoDispatchBelowAutograd():
        return op.overload.redispatch(keyset & _after_autograd_keyset, *args, **options)


def _redispatch_from_forward(*call: Any) -> Any:
    """Redispatch with the two grad modes that ``Function.apply`` turned off. What lies below, such as
    the outer levels of ``torch.func`` transforms, finds them as it does under a built-in operator."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _redispatch(*call)


def _pack(pack: Callable[[Tensor], Any], t: Tensor) -> Any:
    if t.is_inference():  # it has no version, and saving it will raise
        return pack(t)
    version = t._version
    packed = pack(t)
    if t._version != version:  # autograd checks the hooks that it calls itself
        raise RuntimeError("a saved-tensor pack hook must not change its input in place")
    return packed


def _wanted(ctx: Any) -> tuple[bool, bool, Tensor | None]:
    """Which of the two gradients this backward pass asks for, as ``autograd.grad`` may ask for one alone,
    and the buffer that the second one is to be added to."""
    _, a_needs, b_needs = ctx.needs_input_grad
    if not b_needs or torch.compiler.is_dynamo_compiling():
        return a_needs, b_needs, None
    (a_node, _), (b_node, _) = ctx.next_functions
    if a_needs:
        a_needs, b_needs = _will_execute(a_node), _will_execute(b_node)
    return a_needs, b_needs, main_grad_of(b_node) if b_needs else None


def _will_execute(node: Any) -> bool:
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:
        # A leaf that ``autograd.grad`` was asked for, or no engine runs. The error takes 8 us, but nothing
        # else tells such a leaf from one that is not wanted.
        return True


def differentiable(name: str, grad_a: Gradient, grad_b: Gradient, *, mixed: bool) -> None:
    """Registers the autograd kernel of the operator ``name``, bilinear in its first two arguments.

    Unless the operator takes operands of ``mixed`` dtypes, the gradient of an FP32 result of lower
    operands is cast to theirs first, as ``torch.mm`` does.
    """
    op = OPS[name]
    launches = op.launch

    # Host time counts here. Only the two operands are arguments to autograd, which takes 0.2 us for one
    # more, and the context's fields are set without its methods, which take 0.14 us.
    def forward(ctx, how, a, b):
        tensors, call, launch, keyset, pushed = how
        _, a_needs, b_needs = ctx.needs_input_grad
        saved = tensors
        if not (a_needs and b_needs):
            saved = (a if b_needs else None, b if a_needs else None, *tensors[2:])
        hooks = top_hooks(False)
        if hooks is not None:
            pack, unpack = hooks
            packed = [_pack(pack, t) for t in saved if t is not None]  # may stop a recomputation
        ctx.to_save, ctx.materialize_grads, ctx.call = saved, False, call
        if launch is not None:
            y = launch(*tensors, **call[0])
        else:
            y = _redispatch_from_forward(op, keyset, tensors, call[0])
        if hooks is not None:
            packed.reverse()
            push_hooks(lambda _: packed.pop(), unpack)
            pushed.append(True)
        return y

    def backward(ctx, g):
        if g is None:
            return None, None, None
        a, b, *offs = ctx.saved_tensors
        a_needs, b_needs, main_grad = _wanted(ctx)
        call = Call(*ctx.call, main_grad)
        if not mixed and g.dtype != call.a_dtype:
            g = g.to(call.a_dtype)
        return (
            None,
            grad_a(call, g, b, *offs) if a_needs else None,
            grad_b(call, g, a, *offs) if b_needs else None,
        )

    # The plain order: no hooks, and the launch is known, options included.
    def forward_plain(ctx, how, a, b):
        tensors, call, launch, a_needs, b_needs = how
        if a_needs and b_needs:
            ctx.to_save = tensors
        else:
            ctx.to_save = (a if b_needs else None, b if a_needs else None, *tensors[2:])
        ctx.materialize_grads, ctx.call = False, call
        return launch(*tensors)

    # A kernel differentiates at one level of the torch.func transforms and redispatches to the next. The
    # class is named after the operator in graphs, profiles and anomaly reports.
    node = type(
        "".join(part.title() for part in name.split("_")),
        (_SingleLevelFunction,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
            "_compiled_autograd_key": staticmethod(Function._compiled_autograd_key),
        },
    )
    plain = type(node.__name__, (_SingleLevelFunction,), {"forward": staticmethod(forward_plain)})
    plain._backward_cls = node._backward_cls  # in a graph they are the same
    apply, apply_plain = node.apply, plain.apply

    def with_grad(keyset, launch, tensors, call):
        pushed: list[bool] = []
        how = tensors, call, launch, keyset, pushed
        try:
            if peek_interpreter_stack() is not None:
                with enable_single_level_autograd_function():
                    return apply(how, tensors[0], tensors[1])
            return apply(how, tensors[0], tensors[1])
        finally:
            if pushed:
                pop_hooks()

    def call_of(options, a, b):
        return options, a.dtype, b.dtype, b.stride() if b.requires_grad else ()

    def record(keyset, launch, tensors, call, a_needs, b_needs):
        if launch is None or top_hooks(False) is not None:
            return with_grad(keyset, launch, tensors, call)
        if call[0]:
            launch = partial(launch, **call[0])
        return apply_plain((tensors, call, launch, a_needs, b_needs), tensors[0], tensors[1])

    def recorded(launch, a, b):
        call, a_needs, b_needs = call_of({}, a, b), a.requires_grad, b.requires_grad

        def record_known(*tensors):  # `record`, without a call more
            if top_hooks(False) is not None:
                return with_grad(None, launch, tensors, call)
            return apply_plain((tensors, call, launch, a_needs, b_needs), tensors[0], tensors[1])

        return record_known

    def kernel(keyset, *tensors, **options):
        try:
            launch = launches.get(keyset.raw_repr())
            if forward_ad._current_level >= 0:
                _refuse_tangents(name, *tensors)
            a, b = tensors[0], tensors[1]
            a_needs, b_needs = a.requires_grad, b.requires_grad
            if (a_needs or b_needs) and is_grad_enabled():
                return record(keyset, launch, tensors, call_of(options, a, b), a_needs, b_needs)
            if launch is not None:
                return launch(*tensors, **options)
            return _redispatch(op, keyset, tensors, options)
        except AttributeError:
            _refuse_none(op, *tensors)
            raise

    op.recorded = recorded
    LIB.impl(name, kernel, "Autograd", with_keyset=True)


def not_differentiable(name: str, advice: str) -> None:
    """Registers an autograd kernel that refuses inputs which require grad, and counts a write.

    ``advice`` ends the error message. The version of ``out`` is bumped, so that autograd notices when a
    tensor that it saved was written.
    """
    op = OPS[name]
    launches = op.launch
    names = [argument.name for argument in op.overload._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        launch = launches.get(keyset.raw_repr())
        if is_grad_enabled():
            for i, t in enumerate((*args, *kwargs.values())):
                if isinstance(t, Tensor) and t.requires_grad:
                    arg = (*names[: len(args)], *kwargs)[i]
                    raise RuntimeError(
                        f"cake::{name}: not differentiable, but {arg} requires grad; {advice}"
                    )
        try:
            if launch is not None:
                result = launch(*args, **kwargs)
            else:
                result = _redispatch(op, keyset, args, kwargs)
        except AttributeError:
            _refuse_none(op, *args, **kwargs)
            raise
        if op.mutates:
            torch.autograd.graph.increment_version(kwargs["out"] if "out" in kwargs else args[0])
        return result

    LIB.impl(name, kernel, "Autograd", with_keyset=True)


def _refuse_none(op: Op, *args: Any, **kwargs: Any) -> None:
    """The dispatcher takes None for a tensor, and whoever looks at it first stumbles."""
    for i, argument in enumerate(op.overload._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, ...)
        if value is None and str(argument.type) == "Tensor":
            raise RuntimeError(
                f"cake::{op.name}: {argument.name} must be a tensor, got None"
            ) from None


def _refuse_tangents(name: str, *operands: Tensor) -> None:
    for t in operands:
        if forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"cake::{name}: forward-mode differentiation is not implemented; use reverse mode"
            )
