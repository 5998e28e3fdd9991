"""Experts and routers of Hugging Face transformers on the grouped GEMM and the router GEMM.

transformers lets a model's experts be computed by any function in its registry. :func:`register` puts
:func:`experts_forward` there, and ``experts_implementation="cake"`` selects it. The choices (token, expert) are
sorted by expert once, and nothing waits for the device. Three things differ from transformers' own
``grouped_mm``:

* **Sentinels need no mask.** With expert parallelism, choices of experts that live on another rank have ids of
  ``num_experts`` and above. They sort behind the last group, where the operators read nothing and write
  zeros, in the forward and in the data gradient.
* **The routing weight multiplies the input of the down projection**, not its output. The result is the same
  since the product is linear, and with the usual SiLU gate it costs no pass over memory of its own. The
  down projection is then the last operator here that saves tensors, in most models the last of the whole
  layer: recomputing a checkpointed layer stops there (PyTorch's *early stop*), and the projection is not
  computed a second time. Where a norm follows the projection the weight has to stay behind it.
* **Between the GEMMs each step is one pass over memory** (:mod:`.expert_rows`), and sums over a token's
  choices are gathers, in both directions: no atomics, a fixed order.

:func:`use_router_mm` is independent of that: it makes the logits of a model's routers FP32 products.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..grouped_mm import grouped_mm
from ..router_mm import router_mm
from .expert_rows import combine, dispatch, gated_silu

__all__ = ["experts_forward", "register", "use_router_mm"]

NAME = "cake"
OLDEST = "5.17"  # the oldest release whose registry was checked against this module


def register() -> None:
    """Adds ``"cake"`` to transformers' registry of experts implementations; calling it again changes nothing.

    Select it with ``experts_implementation="cake"`` in ``from_pretrained`` or ``from_config``, or with
    ``model.set_experts_implementation("cake")``.

    Raises:
        ImportError: transformers is missing or older than 5.17.
    """
    needs = f"cake_ops.integrations.transformers needs transformers >= {OLDEST}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{needs}, which is not installed") from error
    from packaging.version import Version

    if Version(transformers.__version__).release < Version(OLDEST).release:
        raise ImportError(f"{needs}, found {transformers.__version__}")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module (one decorated with ``use_experts_implementation``).

    Args:
        self: the module: its weights [E, out, in], or [E, in, out] with ``is_transposed`` (both are read
            in place), biases, activation, and the flags of the decorator.
        hidden_states: [T, H].
        top_k_index: [T, k] int64; ids of ``num_experts`` and above contribute nothing.
        top_k_weights: [T, k], FP32 or the dtype of the tokens.

    Returns:
        [T, H] in the dtype of ``hidden_states``. Products are computed in the dtype of the weights, under
        autocast in BF16; sums over the choices in FP32 or wider.
    """
    top_k = top_k_index.shape[1]
    expert, order = top_k_index.flatten().int().sort(stable=True)
    experts = torch.arange(self.num_experts, device=expert.device, dtype=expert.dtype)
    offs = torch.searchsorted(expert, experts, right=True, out_int32=True)
    positions = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, positions)

    up = self.gate_up_proj if self.has_gate else self.up_proj
    autocast = torch.is_autocast_enabled(hidden_states.device.type)
    dtype = torch.bfloat16 if autocast else up.dtype
    token = order // top_k  # of each row
    rows = dispatch(hidden_states, token, inverse, top_k, dtype)
    # A permutation of single numbers; kept in its dtype, for FP32 weights are to be rounded once.
    weight = dispatch(top_k_weights.reshape(-1, 1), order, inverse, 1, top_k_weights.dtype)

    y = grouped_mm(rows, _as_stored(self, up), offs)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        y = y + _bias(rows.new_ones(len(rows), 1), bias, offs)
    normed = getattr(self, "has_post_expert_norm", False)
    if _is_gated_silu(self) and not normed:
        hidden = gated_silu(y, weight)
    else:
        hidden = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        hidden = hidden if normed else (hidden * weight).to(dtype)

    down = _as_stored(self, self.down_proj)
    if self.has_bias:  # before the product, which is to be the last to save
        factor = torch.ones_like(weight) if normed else weight
        y = _bias(factor.to(dtype), self.down_proj_bias, offs) + grouped_mm(hidden, down, offs)
    else:
        y = grouped_mm(hidden, down, offs)
    if normed:
        y = self.post_expert_norm(y) * weight
    return combine(y, token, inverse, top_k, hidden_states.dtype)


def _as_stored(experts: nn.Module, weight: Tensor) -> Tensor:
    """The weight as [E, N, K], a view."""
    return weight.transpose(-2, -1) if experts.is_transposed else weight


def _is_gated_silu(experts: nn.Module) -> bool:
    """Whether the gate is transformers' own, ``act_fn(gate) * up``, with SiLU."""
    if not experts.has_gate or experts._apply_gate.__name__ != "_default_apply_gate":
        return False
    return type(experts.act_fn).__name__ in ("SiLUActivation", "SiLU")


def _bias(factor: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """``factor[m] * bias[e]`` as a product with one column: rows of no group get no bias, and the gradient
    of the bias is summed in FP32, that of ``bias[expert]`` in the dtype of the bias."""
    return grouped_mm(factor, bias.unsqueeze(-1), offs)


def use_router_mm(model: nn.Module) -> list[str]:
    """Makes the routers of ``model`` compute FP32 logits with :func:`cake_ops.router_mm`.

    Within the forward of a router, ``F.linear`` becomes the router GEMM; what the router does with its logits
    (softmax or sigmoid, groups, top-k, scale) stays as it is, and so do parameters, their names and
    ``isinstance``. It serves routers that hold their ``weight`` themselves and hand it to ``F.linear``, such
    as those of Qwen3-MoE, Mixtral, DeepSeek-V3 and gpt-oss. Calling it again changes nothing. Call it
    before parallelism replaces the forward of a router.

    Returns:
        The names of the routers.

    Raises:
        ValueError: no router, or one that is built in another way. Nothing has been changed then.
    """
    routers = {}
    for name, block in model.named_modules():
        if not hasattr(getattr(block, "experts", None), "is_concatenated"):
            continue  # its experts, if any, do not dispatch through the registry
        child = "gate" if hasattr(block, "gate") else "router"
        router, path = getattr(block, child, None), f"{name}.{child}".lstrip(".")
        if not _calls_linear(router):
            raise ValueError(
                f"use_router_mm: {path} must be a router with a parameter weight [E, H] whose own forward"
                f" hands it to F.linear, got {type(router).__name__}"
            )
        routers[path] = router
    if not routers:
        raise ValueError(f"use_router_mm: {type(model).__name__} has no router beside its experts")
    for router in routers.values():
        if not isinstance(router, _RouterMM):
            router.__class__ = _on_router_mm(type(router))
    return list(routers)


def _calls_linear(router: Any) -> bool:
    if isinstance(router, _RouterMM):
        return True
    if getattr(getattr(router, "weight", None), "ndim", 0) != 2 or "forward" in vars(router):
        return False
    return "linear" in inspect.unwrap(type(router).forward).__code__.co_names


class _RouterMM:
    """The forward of a router class with the product exchanged; comes first among its bases."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _LinearIsRouterMM():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


@cache
def _on_router_mm(router: type[nn.Module]) -> type[nn.Module]:
    return type(f"Cake{router.__name__}", (_RouterMM, router), {})


class _LinearIsRouterMM(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (_logits if func is F.linear else func)(*args, **(kwargs or {}))


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = router_mm(input.reshape(-1, input.shape[-1]), weight)
    if bias is not None:
        logits = logits + bias.float()
    return logits.view(*input.shape[:-1], weight.shape[0])
