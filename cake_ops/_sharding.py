"""Sharding rules, so that DTensor arguments pass through the operators.

A product may be sharded along any one dimension of its problem. The tensors that have the dimension are
sharded along it, an operand without it is replicated, and a result without it is a partial sum. Only the
rows (M) and the experts (E) of a grouped GEMM are never sharded: ``offs`` counts local rows, and with
expert parallelism each rank holds other experts and other rows, which is no sharding of one call: use
``to_local()`` there.

Importing DTensor takes a second or so, hence the rules are registered late, when it has been imported
already and calls a fake: it does so before it looks for a rule.
"""

from __future__ import annotations

import sys
from string import ascii_lowercase
from typing import Any

from ._library import OPS

_registered = False


def register_sharding_once() -> None:
    """Registers the rules if ``torch.distributed.tensor`` has been imported and they are not there yet."""
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    _registered = True
    from torch.distributed.tensor.experimental import register_sharding

    for family in ("grouped_mm", "router_mm", "dense_mm", "batched_mm"):
        for form in ("", "_dgrad", "_wgrad"):
            register_sharding(OPS[family + form].overload)(_rule(family, form))


def _dimensions(family: str, form: str, rank: int) -> tuple[str, str, str, str]:
    """The dimensions of the operands a and b and of the result, one letter each, and the shardable ones.

    ``rank`` is the number of dimensions of a, of which :func:`cake_ops.dense_mm` takes any number.
    """
    rows = ascii_lowercase[: rank - 1]
    x, w, g, shardable = {
        "grouped_mm": ("MK", "ENK", "MN", "NK"),
        "router_mm": ("MK", "NK", "MN", "MNK"),
        "dense_mm": (rows + "K", "NK", rows + "N", rows + "NK"),
        "batched_mm": ("LMK", "LNK", "LMN", "LMNK"),
    }[family]
    a, b, y = {"": (x, w, g), "_dgrad": (g, w, x), "_wgrad": (g, x, w)}[form]
    return a, b, y, shardable


def _rule(family: str, form: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def strategies(a_spec, b_spec, *offs, **options):
        a, b, y, shardable = _dimensions(family, form, len(a_spec.shape))
        replicated = [Replicate() for _ in offs]
        rows = [([Replicate()], [Replicate(), Replicate(), *replicated])]
        for letter in shardable:
            result = Shard(y.index(letter)) if letter in y else Partial()
            operands = [Shard(t.index(letter)) if letter in t else Replicate() for t in (a, b)]
            rows.append(([result], [*operands, *replicated]))
        return rows

    return strategies
