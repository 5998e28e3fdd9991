"""Do the tokens go to the same experts? The eight largest logits against FP64's, over many tokens.

Two logits that round to the same FP32 number are a tie: no FP32 result can tell which expert is the
eighth. A token whose experts differ and whose eighth and ninth logits are no tie is counted, and how far
apart they are in FP64, in units of the last place of an FP32 number of that size. Rounding errors of the
product explain a few such units; a wrong logit shows as a wide gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .router_cases import EXPERTS, TOP, RouterCase, RouterData, top_experts

__all__ = ["BATCH", "compare", "tally"]

BATCH = 8192

Logits = Callable[[Tensor, Tensor], Tensor]


def compare(
    arms: Mapping[str, Logits],
    hidden: int,
    tokens: int,
    device: torch.device,
    seed: int,
    *,
    batch: int = BATCH,
    experts: int = EXPERTS,
) -> dict[str, dict[str, float]]:
    """The tally of each arm over at least that many fresh tokens, in whole batches.

    An arm computes logits [batch, experts] from x [batch, hidden] and w [experts, hidden], FP32.
    """
    totals: dict[str, dict[str, float]] = {}
    for i in range(-(-tokens // batch)):
        data = RouterData.random(RouterCase(hidden, batch, experts), device, seed + i)
        exact = data.exact_logits()
        for arm, logits in arms.items():
            found = tally(logits(data.x, data.w), exact)
            total = totals.setdefault(arm, dict.fromkeys(found, 0))
            for key, value in found.items():
                total[key] = max(total[key], value) if key == "widest_ulp" else total[key] + value
    return totals


def tally(logits: Tensor, exact: Tensor) -> dict[str, float]:
    """Tokens, those with other experts than FP64's, of these the ties and the rest, its widest gap."""
    different = (top_experts(logits) != top_experts(exact)).any(dim=1)
    eighth, ninth = exact.topk(TOP + 1, dim=1).values[:, -2:].unbind(dim=1)
    tie = eighth.float() == ninth.float()
    beyond = different & ~tie
    size = eighth.float().abs()
    ulp = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
    gaps = ((eighth - ninth) / ulp)[beyond]
    return {
        "tokens": len(exact),
        "differ": int(different.sum()),
        "ties": int((different & tie).sum()),
        "beyond_ties": int(beyond.sum()),
        "widest_ulp": gaps.max().item() if len(gaps) else 0.0,
    }
