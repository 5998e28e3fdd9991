"""torchtitan 0.3 on cake_ops: three overrides, each named in ``--override.imports`` or left out.

===============  ==========================================  =========================================
override         replaces in the config tree                 by
===============  ==========================================  =========================================
``experts``      ``GroupedExperts.Config`` and subclasses    the same class, its GEMMs ``grouped_mm``
``router_gate``  ``Linear.Config`` of every ``router.gate``  :class:`RouterGate`, on ``router_mm``
``selective_ac`` ``SelectiveAC.Config``                      :class:`CakeSelectiveAC`
===============  ==========================================  =========================================

A target is written with its module, ``cake_ops.integrations.torchtitan.experts``. Modules keep their
parameters, names, initialisation and sharding, so checkpoints go both ways. An override refuses a config
that was changed already in the place it would replace, such as quantised experts, with a ``RuntimeError``.

The seam of the experts is ``GroupedExperts._grouped_mm``, which torchtitan's own low-precision experts
override too. It casts to BF16 before it and takes int32 ends, so nothing is converted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..grouped_mm import grouped_mm

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts
except ImportError as error:
    raise ImportError(
        "cake_ops.integrations.torchtitan needs torchtitan 0.3 with its dependencies"
        f" (pip install torchtitan==0.3.0): {error}"
    ) from error

__all__ = [
    "SAVE_OPS",
    "CakeSelectiveAC",
    "RouterGate",
    "experts",
    "experts_class",
    "router_gate",
    "selective_ac",
]

SAVE_OPS = frozenset({torch.ops.cake.grouped_mm.default, torch.ops.cake.router_mm.default})
"""The forward products, for a ``get_save_ops`` of your own. A policy compares overloads, not packets."""


@cache
def experts_class(base: type[GroupedExperts]) -> type[GroupedExperts]:
    """A subclass of ``base`` that differs in its grouped GEMM alone; always the same one for a base.

    Args:
        base: ``GroupedExperts`` or a subclass that computes through its ``_grouped_mm``, such as
            gpt-oss's. Quantised experts raise ``RuntimeError``.
    """
    quantised = any("components.quantization" in c.__module__ for c in base.__mro__)
    if quantised or base._grouped_mm is not GroupedExperts._grouped_mm:
        raise RuntimeError(
            f"cake_ops.integrations.torchtitan.experts: {base.__qualname__} has grouped GEMMs of its"
            " own; only those that torchtitan computes in BF16 can be replaced"
        )

    class CakeExperts(base):
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            """``A [M, K]`` times ``B_t [E, K, N]``, ``offs`` [E] int32 cumulative ends -> [M, N]."""
            return grouped_mm(A, B_t.transpose(-2, -1), offs)

    CakeExperts.__name__ = CakeExperts.__qualname__ = f"Cake{base.__name__}"
    CakeExperts.Config.__qualname__ = f"{CakeExperts.__name__}.Config"  # torchtitan logs it
    return CakeExperts


class RouterGate(nn.RouterLinear, Linear):
    """A router's gate with FP32 logits, of FP32 or BF16 tokens [.., D] and weight [E, D].

    torchtitan asks for FP32 by autocast, which the CPU's does not know. This needs no autocast.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class CakeSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also saves what the operators of cake_ops computed.

    Without it every grouped GEMM runs again in the backward: torchtitan's list has none, not
    torch's own either.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | SAVE_OPS


@override(target=GroupedExperts.Config, description="Grouped GEMMs of cake_ops.")
def experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """The config of the same experts on :func:`cake_ops.grouped_mm`."""
    return derive(config, experts_class(config._owner).Config)


@override(target=Linear.Config, fqns=["*router.gate"], description="FP32 gate of cake_ops.")
def router_gate(config: Linear.Config) -> RouterGate.Config:
    """The config of the same gate on :func:`cake_ops.router_mm`."""
    _require_plain("router_gate", config, Linear.Config)
    return derive(config, RouterGate.Config)


@override(target=SelectiveAC.Config, description="Saves the results of cake_ops' operators.")
def selective_ac(config: SelectiveAC.Config) -> CakeSelectiveAC.Config:
    """The config of the same checkpointing with :data:`SAVE_OPS`."""
    _require_plain("selective_ac", config, SelectiveAC.Config)
    return derive(config, CakeSelectiveAC.Config)


def _require_plain(name: str, config: Any, expected: type) -> None:
    if type(config) is not expected:
        raise RuntimeError(
            f"cake_ops.integrations.torchtitan.{name}: the config must be a {expected.__qualname__}"
            f" itself, got {type(config).__qualname__}, whose changes would be lost"
        )
