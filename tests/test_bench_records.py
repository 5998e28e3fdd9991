"""The benchmark's statistics, its JSON file, merging, tables, picture and progress line."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from cake_ops.bench import records
from cake_ops.bench.__main__ import main
from cake_ops.bench.progress import Progress, minutes
from cake_ops.bench.report import census_difference, plot, render

META = dict.fromkeys(records.META_KEYS, "x")


def test_ratios_are_formed_inside_groups():
    assert records.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == [2.0, 1.0, 3.0]
    assert records.geomean([1.0, 4.0]) == pytest.approx(2.0)


def test_a_row_has_the_format_of_the_file():
    row = records.row_record(
        "s",
        "fwd",
        "eager",
        {"cake": [1.0, 2.0, 4.0], "torch": [2.0, 4.0, 9.0]},
        {"cake": 0.1, "torch": 0.2},
    )
    assert row == {
        "shape": "s",
        "op": "fwd",
        "mode": "eager",
        "arms": {
            "cake": {"median_us": 2.0, "min_us": 1.0, "max_us": 4.0, "rel_error": 0.1},
            "torch": {"median_us": 4.0, "min_us": 2.0, "max_us": 9.0, "rel_error": 0.2},
        },
        "ratios": {"torch": [2.0, 2.0, 2.25]},
    }


def test_the_bar_is_the_faster_library():
    ratios = {
        "control": [0.9, 0, 0],
        "torch": [1.2, 0, 0],
        "cublas": [1.1, 0, 0],
        "deepgemm": [0.8, 0, 0],
    }
    assert records.best_library({"ratios": ratios}) == 1.1
    assert records.best_library({"ratios": {"control": [1, 1, 1]}}) is None


def some_results(path=None, **meta):
    """Three rows of two operations with known ratios."""
    found = records.Results({**META, "gpu": "G", **meta}, path)
    for shape, op, torch_us in (("A", "ckpt", 20.0), ("BB", "ckpt", 5.0), ("A", "ckpt ES", 10.0)):
        us = {"cake": [10.0] * 3, "control": [10.0, 10.5, 9.5], "torch": [torch_us] * 3}
        kernels = {"fwd": 2 if op == "ckpt" else 1, "dgrad": 1}
        detail = {
            "flops": 1e10,
            "us": us,
            "census": {"cake": kernels, "torch": {"fwd": 2, "dgrad": 1}},
            "host_us": {"cake": 5.0, "torch": 8.0},
            "clock_mhz": [1980, 1500],
            "skipped": {"deepgemm": "not here"},
            "remarks": ["torch: differs"],
        }
        found.add(records.row_record(shape, op, "eager", us, dict.fromkeys(us, 1e-3)), detail)
    return found


def test_the_file_is_written_after_every_row_and_read_back(tmp_path):
    path = tmp_path / "r.json"
    found = some_results(path)
    document = json.loads(path.read_text())
    assert list(document) == ["meta", "rows", "details"]
    assert list(document["meta"]) == list(records.META_KEYS)
    assert document["rows"] == found.rows
    again = records.Results.load(path)
    assert (again.meta, again.rows, again.details) == (found.meta, found.rows, found.details)
    found.add(found.rows[0], found.details[0])
    assert len(records.Results.load(path).rows) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_render_gives_ratios_geomeans_census_and_notes():
    text = render(some_results())
    assert "gpu G" in text
    assert re.search(
        r"^A +10\.0 +1000\.0 +1\.000 \[0\.950, 1\.050\] +2\.000 \[2\.000, 2\.000\]$",
        text,
        re.MULTILINE,
    )
    assert (
        "torch          geomean 1.000, below 1 in 1 of 2, lowest 0.500 (BB), highest 2.000 (A)"
        in text
    )
    assert "best of torch  geomean 1.000" in text
    assert "host us a call, median of 2 rows under 2 ms: cake 5.0, torch 8.0" in text
    assert "cake launches 2 x fwd, 1 x dgrad" in text
    assert "left out in 2 rows: deepgemm: not here" in text
    assert "note on torch: differs" in text
    assert "SM clock under load: 1500 to 1500 MHz" in text
    spared = text[text.index("early stop spares in ckpt, eager") :]
    assert "cake: 1 x fwd (1 rows)" in spared and "torch: nothing (1 rows)" in spared


def test_render_sums_a_mode_up_over_its_operations():
    text = render(some_results())
    assert "all operations, eager\n  best of torch  geomean 1.000, below 1 in 1 of 3, " in text
    assert "lowest 0.500 (ckpt, BB), highest 2.000 (ckpt, A)" in text


def test_census_difference():
    assert census_difference({"a": 2, "b": 1}, {"a": 1, "c": 3}) == {"a": 1, "b": 1, "c": -3}


def test_plot_draws_every_section(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    plot(some_results(), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_merge_joins_rows_and_keeps_the_later_of_two(tmp_path, capsys):
    first, second, joined = (tmp_path / f"{name}.json" for name in "abj")
    some_results(first, command="c1")
    other = some_results(None, command="c2")
    other.rows[0]["arms"]["cake"]["median_us"] = 77.0
    other.rows[1]["shape"] = "C"
    other.path = second
    other.save()
    assert main(["merge", str(first), str(second), "--json", str(joined)]) == 0
    out, err = capsys.readouterr()
    assert "measured again" in err and "A, ckpt, eager" in err
    merged = records.Results.load(joined)
    assert [row["shape"] for row in merged.rows] == ["A", "BB", "A", "C"]
    assert merged.rows[0]["arms"]["cake"]["median_us"] == 77.0
    assert merged.meta["command"] == "c1 ; c2"
    assert render(merged) in out


def test_merge_refuses_another_gpu():
    with pytest.raises(RuntimeError, match="different gpu: 'G' and 'H'"):
        some_results().update(some_results(gpu="H"))


def test_progress_scales_its_estimate(monkeypatch):
    now = iter([0.0, 30.0, 40.0])  # start, at the second step, at the end
    monkeypatch.setattr("cake_ops.bench.progress.time.monotonic", lambda: next(now))
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    progress = Progress([("a", 10.0), ("b", 20.0)], stream)
    progress.begin(0)
    progress.begin(1)
    progress.end()
    assert written == [
        "[1/2] a: about 30 s left\n",
        "[2/2] b: about 1 min 00 s left\n",
        "[2/2] done in 40 s\n",
    ]
    assert minutes(185) == "3 min 05 s"
