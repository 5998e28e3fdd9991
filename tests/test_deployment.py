"""The page on export and AOTInductor holds; ``test_export`` has the cases one by one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from cake_ops.testing import count_launches

PAGE = (Path(__file__).resolve().parents[1] / "docs/deployment.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("unseen_gpu")
def test_documentation_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    script = tmp_path / "deployment.py"
    script.write_text(source)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1), count_launches() as launches:
        runpy.run_path(str(script))
    runs = 3 * 4  # three sizes: program, model, package, model
    assert launches == {"grouped_mm": 2 * runs, "router_mm": runs}
