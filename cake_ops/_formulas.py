"""The gradients of every operator, in operators of the same families.

With y = x w^T, dx = g w and dw = g^T x (for each group, matrix or batch), each of the three products is
bilinear and its two gradients are the other two products. So three operators a family are closed under
differentiation, and double backward needs no formula of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._autograd import Call, differentiable, not_differentiable
from ._eager import by_out_dtype, eager
from ._library import OPS


class _Product:
    """Calls one operator of a family with the options of the call that is being differentiated."""

    def __init__(self, name: str) -> None:
        self.overload = OPS[name].overload
        self.accepts = {argument.name for argument in self.overload._schema.arguments}
        self.mixed = name.startswith("router")  # operands and result may differ in dtype
        served = eager(name)
        by_dtype = "out_dtype" in self.accepts
        self.eager = by_out_dtype(name) if by_dtype else lambda out_dtype: served

    def __call__(self, call: Call, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        # A dtype that is the default is not passed: it costs the dispatcher a microsecond.
        casts = self.mixed and dtype != torch.float32 and "out_dtype" in self.accepts
        out_dtype = dtype if casts else None
        if "deterministic" in self.accepts and not call.options.get("deterministic", True):
            options = {"out_dtype": out_dtype} if casts else {}
            result = self.overload(*tensors, deterministic=False, **options)
        else:
            result = self.eager(out_dtype)(*tensors)
        return result if result.dtype == dtype else result.to(dtype)


def _differentiate_family(fwd_name: str) -> None:
    fwd, dgrad, wgrad = (_Product(fwd_name + suffix) for suffix in ("", "_dgrad", "_wgrad"))

    add = OPS.get(f"{fwd_name}_wgrad_")

    def weight_grad(call: Call, g: Tensor, x: Tensor, *offs: Tensor) -> Tensor | None:
        """g^T x in the memory order of the weight, or added to its ``main_grad``."""
        if call.main_grad is not None and add is not None:
            options = {k: v for k, v in call.options.items() if k == "deterministic"}
            add.overload(call.main_grad, g, x, *offs, **options)
            return None
        if call.b_transposed:
            return wgrad(call, call.b_dtype, x, g, *offs).transpose(-2, -1)
        return wgrad(call, call.b_dtype, g, x, *offs)

    differentiable(  # y = x w^T
        fwd_name,
        lambda call, g, w, *offs: dgrad(call, call.a_dtype, g, w, *offs),
        weight_grad,
        mixed=fwd.mixed,
    )
    differentiable(  # dx = g w; ``ddx`` is the gradient of dx
        f"{fwd_name}_dgrad",
        lambda call, ddx, w, *offs: fwd(call, call.a_dtype, ddx, w, *offs),
        lambda call, ddx, g, *offs: weight_grad(call, g, ddx, *offs),
        mixed=fwd.mixed,
    )
    differentiable(  # dw = g^T x; ``ddw`` is the gradient of dw
        f"{fwd_name}_wgrad",
        lambda call, ddw, x, *offs: fwd(call, call.a_dtype, x, ddw, *offs),
        lambda call, ddw, g, *offs: dgrad(call, call.b_dtype, g, ddw, *offs),
        mixed=fwd.mixed,
    )


for _family in ("grouped_mm", "router_mm", "dense_mm", "batched_mm"):
    _differentiate_family(_family)

for _op in OPS.values():
    if _op.mutates:
        not_differentiable(
            _op.name, "detach it, call under torch.no_grad(), or use the form without out"
        )
not_differentiable("split_bf16x3", "detach x first (rounding has no useful derivative)")
