"""``python -m cake_ops.bench router``: the FP32 router GEMM against FP32 libraries, row by row.

Nine shapes (H 4096, 5120, 6144; T 64, 256, 1024; 256 experts), the three passes alone and as the backward
and the checkpointed step that they make up, eager and as a CUDA graph. The bar is the fastest of the FP32
libraries: torch, cublas and cublaslt, which is the best of all that cuBLASLt proposes. Rows are checked
and timed as in every benchmark here (`suite`).

After the rows the experts that the logits choose are compared with FP64's over 10^5 tokens (--tokens).
With --tune the rows are left out: every kernel configuration of the router is timed at many sizes, and the
fastest ones serve from then on (`router_tune`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import cake_ops
from cake_ops.cuda.device import no_kernels_reason

from . import command, router_cases, router_experts, router_tune
from .arms import Arm
from .router_arms import ARMS, Libraries, fp32_precision, tf32_mm, tolerance
from .router_cases import OPS, RouterData
from .shapes import Row
from .suite import Suite
from .timing import Device

__all__ = ["Router", "add_arguments", "main"]

EXPERTS_HIDDEN = (4096, 7168)


class Router(Suite):
    ops = tuple(OPS)
    arms = ARMS
    groups = 20
    rows_help = 'only rows whose name matches, e.g. "T64," or "H6144 .*fwd, graph"'

    def __init__(self, tokens: int = 0) -> None:
        self._tokens = tokens
        self._libraries: Libraries | None = None

    def rows(self, which: str) -> list[Row]:
        return {
            "all": router_cases.all_rows,
            "quick": router_cases.quick_rows,
            "smoke": router_cases.smoke_rows,
        }[which]()

    def seconds(self, row: Row, arms: int, groups: int) -> float:
        """A call takes half a millisecond with its cold cache and synchronisation, whatever it computes.

        The fixed part is the profiler, the captures, the FP64 check and, spread over the rows, the choice
        of cuBLASLt's algorithms; an eager row measures 1000 calls of each arm on the host.
        """
        host = arms * 1000 * 20e-6 * len(OPS[row.op]) if row.mode == "eager" else 0.0
        return arms * (groups + 5) * 0.5e-3 + 0.5 + host

    def flops(self, row: Row) -> float:
        return router_cases.flops(row.case, row.op)

    def operands(self, row: Row, device: Device, seed: int) -> RouterData:
        self._libraries = self._libraries or Libraries(device)
        return RouterData.random(row.case, device.torch_device, seed)

    def build(self, arm: str, row: Row, operands: RouterData) -> Arm:
        assert self._libraries is not None
        return self._libraries.build(arm, row.op, operands)

    def check(
        self, arm: str, row: Row, operands: RouterData, outputs: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, float]]:
        return router_cases.measure_outputs(operands, outputs, tolerance(arm))

    def remark(self, arm: str, row: Row) -> str | None:
        if arm in ("cublas", "cublaslt") and row.mode == "eager":
            return "called through ctypes, which its host time contains"
        return {
            "tf32": "torch.mm with TF32 on: not FP32 accurate",
            "bf16": "operands cast to BF16 beforehand, BF16 result: not FP32 accurate",
        }.get(arm)

    def findings(self, device: Device, seed: int) -> dict[str, dict[str, Any]]:
        found = {}
        if self._libraries is not None and self._libraries.choices:
            found["algorithms of cublaslt"] = dict(self._libraries.choices)
        if self._tokens:
            found["experts unlike FP64's"] = self._experts(device, seed)
        return found

    def _experts(self, device: Device, seed: int) -> dict[str, dict[str, float]]:
        smoke = device.torch_device.type == "cpu"
        arms = {
            "cake": cake_ops.router_mm,
            "torch": lambda x, w: torch.mm(x, w.t()),
            "tf32": lambda x, w: tf32_mm(x, w.t()),
        }
        found = {}
        for hidden in (64,) if smoke else EXPERTS_HIDDEN:
            tallies = router_experts.compare(
                arms,
                hidden,
                min(self._tokens, 256) if smoke else self._tokens,
                device.torch_device,
                seed,
                batch=64 if smoke else router_experts.BATCH,
            )
            found |= {f"H{hidden} {arm}": figures for arm, figures in tallies.items()}
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser, Router())
    parser.add_argument(
        "--tokens",
        type=int,
        default=13 * router_experts.BATCH,
        help="compare the experts of so many tokens with FP64's; 0: leave out (default %(default)s)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time every kernel configuration instead and keep the fastest ones in the user's cache; "
        "--json then receives all times. Under a minute on an H200",
    )
    parser.add_argument(
        "--hidden",
        metavar="H,...",
        default="4096,5120,6144",
        help="widths to tune (default %(default)s)",
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=router_cases.EXPERTS,
        help="experts to tune (default %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    with fp32_precision("highest"):
        return _tune(args) if args.tune else command.main(args, Router(args.tokens))


def _tune(args: argparse.Namespace) -> int:
    try:
        hidden = [int(text) for text in args.hidden.split(",")]
    except ValueError:
        raise SystemExit(f"--hidden: not a list of integers: {args.hidden!r}") from None
    if min(hidden) < 1 or args.experts < router_cases.TOP:
        raise SystemExit(
            f"--hidden takes positive widths and --experts at least {router_cases.TOP}, got"
            f" {args.hidden} and {args.experts}"
        )
    if args.device != "cuda" or not torch.cuda.is_available():
        print("--tune needs a CUDA device", file=sys.stderr)
        return 2
    if not command.has_folder(args.json):
        return 2
    device = command.open_device("cuda")
    if device is None:
        return 2
    reason = no_kernels_reason(device.torch_device.index)
    if reason:
        print(f"there is nothing to tune: {reason}", file=sys.stderr)
        return 2
    seed = 0 if args.seed is None else args.seed
    path = router_tune.tune(device, hidden, args.experts, seed, args.json)
    print(f"stored in {path}")
    return 0
