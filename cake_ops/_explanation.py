"""What :func:`cake_ops.explain` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """How a call would be served.

    Attributes:
        path: ``"kernel"``: one kernel of this package on the operands as they lie. ``"kernel after a
            copy"``: the same on a copy of an operand. ``"torch"``: through torch. ``"no kernel"``:
            nothing to multiply.
        reason: why the path is not ``"kernel"``, or what computes.
        kernel: the kernel's name; empty unless the path is ``"kernel"``. So are the rest.
        tile: rows, columns and contraction steps of a CTA's tile.
        stages: depth of the ring of shared-memory stages.
        cluster: CTAs of a cluster.
        grid, threads: CTAs of the launch, and threads of each.
        smem_bytes: dynamic shared memory of a CTA.
        schedule: how tiles are dealt to CTAs.
        chosen_by: what chose this kernel among those that compute the call: ``"cost model"``; a verdict
            of the router's, ``"override"``, ``"tuned"`` or ``"shipped"``; ``"caller"``, who names it.
        workspace_bytes: device memory beyond operands and result.
    """

    path: str
    reason: str = ""
    kernel: str = ""
    tile: tuple[int, int, int] | None = None
    stages: int = 0
    cluster: int = 0
    grid: int = 0
    threads: int = 0
    smem_bytes: int = 0
    schedule: str = ""
    chosen_by: str = ""
    workspace_bytes: int = 0

    def __str__(self) -> str:
        if not self.kernel:
            return f"{self.path}: {self.reason}"
        m, n, k = self.tile or (0, 0, 0)
        return (
            f"kernel {self.kernel}: tile {m}x{n}x{k}, {self.stages} stages, cluster {self.cluster},"
            f" grid {self.grid} x {self.threads} threads, {self.smem_bytes} bytes of shared memory,"
            f" {self.schedule}, chosen by: {self.chosen_by}, workspace {self.workspace_bytes} bytes"
        )
