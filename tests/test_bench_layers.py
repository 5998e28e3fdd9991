"""The benchmark of transformers' layers: its rows, its reference, and the pipeline on tiny layers.

No figure is tested here, only that every arm computes the same with its own implementation on the same
weights, and that a wrong result or a lost arm would be reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the client: transformers")

from cake_ops.bench import layers
from cake_ops.bench.__main__ import main
from cake_ops.bench.devices import CpuDevice
from cake_ops.bench.layer_data import LAYERS, TINY, Data
from cake_ops.bench.records import Results
from cake_ops.integrations.transformers import register
from cake_ops.testing import count_launches

pytestmark = pytest.mark.client
IMPLEMENTATIONS = ("cake", "grouped_mm", "eager")


@pytest.fixture(autouse=True)
def poison():
    """The harness poisons by itself."""


@pytest.fixture(params=TINY, ids=lambda layer: layer.family)
def data(request: pytest.FixtureRequest) -> Data:
    register()
    return Data(request.param, 23, IMPLEMENTATIONS, torch.device("cpu"))


def test_rows() -> None:
    names = [row.name for row in layers.rows()]
    assert len(names) == len(set(names)) == 10
    assert "Mixtral-8x7B, 32768 tokens, graph" in names
    assert "Mixtral-8x7B, 32768 tokens, compile" not in names
    assert len(layers.rows("32768.*compile")) == 2
    assert {(row.tokens, row.mode) for row in layers.rows(quick=True)} == {
        (8192, "eager"),
        (8192, "graph"),
    }
    qwen, mixtral = LAYERS
    assert (
        qwen.flops(1) == 18 * 8 * 2048 * 768
    )  # three passes of gate, up and down, 2 a multiply-add
    assert (mixtral.hidden, mixtral.inner, mixtral.experts, mixtral.top_k) == (4096, 14336, 8, 2)


def test_blocks_share_weights_and_differ_in_implementation(data: Data) -> None:
    first, *others = (dict(block.named_parameters()) for block in data.blocks.values())
    assert all(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in first.values())
    assert all(other[name] is p for other in others for name, p in first.items())
    for name, block in data.blocks.items():
        with count_launches() as launches:
            error = data.error(data.step(block))
        assert error < 0.01
        assert launches["grouped_mm"] == (2 if name == "cake" else 0)
        assert launches["grouped_mm_wgrad"] == (2 if name == "cake" else 0)


def test_wrong_results_are_reported(data: Data) -> None:
    outputs = data.step(data.blocks["cake"])
    assert outputs.keys() == data.expected.keys()
    for name in outputs:
        wrong = outputs[name].clone()
        wrong.view(-1)[-1] = float("nan")
        with pytest.raises(RuntimeError, match=f"inaccurate {name}: relative error nan"):
            data.error(outputs | {name: wrong})
        wrong = outputs[name].clone()
        wrong.flatten(0, -2)[-1] *= 1.5
        with pytest.raises(RuntimeError, match=f"inaccurate {name}"):
            data.error(outputs | {name: wrong})


def test_arm_that_fails_is_left_out_and_cake_fails_the_row(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, row = CpuDevice(), layers.Row(data.layer, data.tokens, "eager")
    step = Data.step

    def failing(broken: str):
        def run(self, block, compiled=None):
            outputs = dict(step(self, block, compiled))
            if block is self.blocks[broken]:
                outputs["x"] = torch.zeros_like(outputs["x"])
            return outputs

        return run

    monkeypatch.setattr(Data, "step", failing("eager"))
    record, detail = layers.run_row(row, device, data, 2)
    assert list(record["arms"]) == ["cake", "control", "grouped_mm"]
    assert detail["skipped"].keys() == {"eager"} and "inaccurate x" in detail["skipped"]["eager"]
    monkeypatch.setattr(Data, "step", failing("cake"))
    with pytest.raises(RuntimeError, match="inaccurate x"):
        layers.run_row(row, device, data, 2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    assert main(["layers", "--device", "cpu", "--groups", "2", "--json", str(path)]) == 0
    table = capsys.readouterr().out
    results = Results.load(path)
    assert [row["shape"] for row in results.rows] == [f"{layer.name}, 40 tokens" for layer in TINY]
    for row, detail in zip(results.rows, results.details, strict=True):
        assert list(row["arms"]) == list(layers.ARMS)
        us = row["arms"]["cake"]["median_us"]
        assert row["arms"]["cake"]["tokens_per_s"] == pytest.approx(40e6 / us, rel=1e-4)
        assert [len(times) for times in detail["us"].values()] == [2] * 4
        assert row["shape"] in table
        assert "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratios"]["grouped_mm"]) in table
    assert json.loads(path.read_text())["meta"]["versions"]["transformers"]
    assert main(["merge", str(path)]) == 0  # the format of the other benchmarks


def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["--rows", "nothing"], "no row matches"),
        (["--groups", "1"], "at least 2"),
        (["--json", str(tmp_path / "none/x.json")], "there is no folder"),
    ):
        assert main(["layers", "--device", "cpu", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["layers", "--rows", "["])
    assert "'[' is no regular expression" in capsys.readouterr().err
    assert main(["layers", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_without_transformers_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["layers", "--device", "cpu"]) == 2
    assert "needs transformers >= 5.17, which is not installed" in capsys.readouterr().err
