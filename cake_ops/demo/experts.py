"""The three ways to multiply sorted rows with their experts' weights that the demo compares.

All have one signature: ``(x [R, K], w [E, N, K], offs [E] int32 cumulative ends) -> y [R, N]``, where
rows ``offs[e-1]:offs[e]`` of ``x`` belong to expert ``e``. Everything else in the model is shared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import cake_ops

from .model import GroupedMM, ModelConfig


def grouped_mm_torch(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)


def grouped_mm_loop(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    ends = (
        offs.tolist()
    )  # reads the counts on the host: on a GPU it waits for all work queued so far
    starts = [0, *ends[:-1]]
    return torch.cat([x[a:b] @ w[e].t() for e, (a, b) in enumerate(zip(starts, ends, strict=True))])


GROUPED_MM: dict[str, GroupedMM] = {
    "cake": cake_ops.grouped_mm,
    "torch": grouped_mm_torch,
    "loop": grouped_mm_loop,
}


def why_not_run(arm: str, dtype: torch.dtype, shape: ModelConfig) -> str:
    """The reason why ``arm`` cannot run a model of this ``shape``, or ''."""
    if arm == "torch":
        for name in ("width", "hidden"):
            row = getattr(shape, name) * dtype.itemsize
            if row % 16:
                return f"its rows must be a multiple of 16 bytes, and --{name} makes {row}"
    return ""


def why_not_compiled(arm: str, dtype: torch.dtype) -> str:
    """The reason why ``torch.compile(fullgraph=True)`` cannot trace ``arm``, or ''."""
    if arm == "loop":
        return "it reads the counts on the host"
    if arm == "torch" and dtype != torch.bfloat16:
        return f"its fake kernel takes bfloat16 alone, and this run has {dtype}"
    return ""
