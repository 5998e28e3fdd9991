"""Sharding rules, so that DTensor arguments pass through the operators.

Importing DTensor takes a second or so; the rules are registered when it is there already, at the first
call that is not plain eager (a DTensor call never is). Each rule is a list of ``(outputs, inputs)``
placements. ``offs`` counts local rows, so it and the rows (M) are replicated. Expert parallelism, where
each rank holds other experts and other rows, is no sharding of one call: use ``to_local()`` there.
"""

from __future__ import annotations

import sys

from ._library import OPS

_registered = False


def register_sharding_once() -> None:
    """Registers the rules if ``torch.distributed.tensor`` has been imported and they are not there yet."""
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    _registered = True
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    R, P = Replicate(), Partial()
    S0, S1, S2 = Shard(0), Shard(1), Shard(2)
    # For each operator: [(output, (input, input))], without offs.
    grouped = {
        "grouped_mm": [(R, (R, R)), (S1, (R, S1)), (P, (S1, S2))],
        "grouped_mm_dgrad": [(R, (R, R)), (P, (S1, S1)), (S1, (R, S2))],
        "grouped_mm_wgrad": [(R, (R, R)), (S1, (S1, R)), (S2, (R, S1))],
    }
    matrix = {
        "mm": [(R, (R, R)), (S0, (S0, R)), (S1, (R, S0)), (P, (S1, S1))],
        "mm_dgrad": [(R, (R, R)), (S0, (S0, R)), (P, (S1, S0)), (S1, (R, S1))],
        "mm_wgrad": [(R, (R, R)), (S0, (S1, R)), (S1, (R, S1)), (P, (S0, S0))],
    }
    batched = {
        "batched_mm": [(R, (R, R)), (S0, (S0, S0)), (S1, (S1, R)), (S2, (R, S1)), (P, (S2, S2))],
        "batched_mm_dgrad": [
            (R, (R, R)),
            (S0, (S0, S0)),
            (S1, (S1, R)),
            (P, (S2, S1)),
            (S2, (R, S2)),
        ],
        "batched_mm_wgrad": [
            (R, (R, R)),
            (S0, (S0, S0)),
            (S1, (S2, R)),
            (S2, (R, S2)),
            (P, (S1, S1)),
        ],
    }

    def rule(rows, *, has_offs=False):
        def strategies(*args, **kwargs):
            extra = [R] if has_offs else [None] * (len(args) - 2)
            return [([out], [*ins, *extra]) for out, ins in rows]

        return strategies

    def dense_rule(suffix):
        def strategies(a, b, **kwargs):
            # dense operands may have leading dimensions: M is the flattened rest, sharded on dim 0
            last = Shard(len(a.shape) - 1)
            swap = {S1: last}
            rows = matrix[suffix]
            if suffix == "mm_wgrad":
                return [([o], [swap.get(i, i) for i in ins]) for o, ins in rows]
            return [([swap.get(o, o)], [swap.get(ins[0], ins[0]), ins[1]]) for o, ins in rows]

        return strategies

    for name, rows in grouped.items():
        register_sharding(OPS[name].overload)(rule(rows, has_offs=True))
    for name, rows in batched.items():
        register_sharding(OPS[name].overload)(rule(rows))
    for suffix, rows in matrix.items():
        register_sharding(OPS[f"router_{suffix}"].overload)(rule(rows))
        register_sharding(OPS[f"dense_{suffix}"].overload)(dense_rule(suffix))
