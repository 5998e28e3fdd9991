"""Programs on several ranks, started by torchrun, and the one that docs/distributed.md gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# One thread each, on the CPU, and over the loopback interface, which needs no host name.
ON_THE_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(ranks: int, *script: str, **environment: str) -> None:
    """Ends well, or raises with what the ranks wrote."""
    done = subprocess.run(
        [*TORCHRUN, str(ranks), *script],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def recipe() -> str:
    """The program in docs/distributed.md."""
    text = (Path(__file__).parents[1] / "docs/distributed.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert "\nassert losses" in source
    return source
