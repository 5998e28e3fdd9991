"""The pages in docs/: the API page is what the docstrings make, links lead somewhere, figures are the measured ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cake_ops
import cake_ops.distributed
from cake_ops.bench.records import geomean

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
API, PEERS = (ROOT / "docs/api.md").read_text(), (ROOT / "docs/peers.md").read_text()


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs/generate_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?s)^```.*?^```$", "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The API page


def test_api_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.render() == API, "make docs"


def test_every_public_name_is_on_the_api_page() -> None:
    modules = {"cake_ops": cake_ops, "cake_ops.distributed": cake_ops.distributed}
    for name in ("functional", "nn", "profiling", "testing"):
        modules[f"cake_ops.{name}"] = getattr(cake_ops, name)
    public = {
        f"{module}.{name}"
        for module, found in modules.items()
        for name in found.__all__
        if name != "__version__" and not isinstance(getattr(found, name), ModuleType)
    }
    for page in ("transformers", "torchtitan", "kernels"):  # which need not be installed
        path = ROOT / "cake_ops/integrations" / page
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        (names,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        public |= {f"cake_ops.integrations.{page}.{name}" for name in names}
    assert len(public) > 30
    shown = re.findall(r"^### (.+)$", API, re.MULTILINE)
    assert sorted(shown) == sorted(public)


def test_everything_on_the_api_page_has_a_docstring(generator: ModuleType) -> None:
    undocumented = [
        name
        for module, file in generator.SECTIONS.values()
        for name, node, text in generator._public(
            ast.parse((ROOT / "cake_ops" / file).read_text()), file
        )
        if not text and not isinstance(node, ast.Assign)
    ]
    assert undocumented == []


def test_markdown_of_a_docstring(generator: ModuleType) -> None:
    docstring = """Adds ``a`` and :func:`cake_ops.linear`.

    ====  ======
    one   two
    ====  ======
    ``a``  b
    ====  ======

    Args:
        a, b: two numbers, over
            two lines.
        *rest: more.

    Example::

        f(1)
            g(2)

    Rules of both:
        * first
    """
    assert generator._markdown(ast.get_docstring(ast.parse(f'"""{docstring}"""'))) == (
        "Adds `a` and `cake_ops.linear`.\n\n"
        "| one | two |\n|---|---|\n| `a` | b |\n\n"
        "**Args:**\n\n- `a`, `b`: two numbers, over\n  two lines.\n- `*rest`: more.\n\n"
        "Example:\n\n```python\nf(1)\n    g(2)\n```\n\n"
        "**Rules of both:**\n\n* first"
    )


@pytest.mark.parametrize(
    "source",
    [
        "f(x: Tensor, *, k: int = 3) -> Tensor",
        "f(*xs: Tensor, y=1, **options: Any) -> None",
        "f(a, b=2)",
    ],
)
def test_signature(generator: ModuleType, source: str) -> None:
    (function,) = ast.parse(f"def {source}: pass").body
    assert generator._signature("f", function) == f"```python\n{source}\n```"


# Links


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?s)^```.*?^```$", "", text)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / file if file else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page for page in PAGES[1:] if f"]({page})" not in readme] == []


# Figures

PASSES = ("fwd", "dgrad", "dW")
PEER_ARMS = ("torch", "cublas", "deepgemm")


@cache
def measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"cake_ops/bench/results/{name}-h200.json").read_text())


def grouped_rows(name: str, mode: str = "eager", results: str = "grouped") -> list[dict[str, Any]]:
    """The rows of an operation, those of the large problems or, with "small " before it, of the small ones."""
    op, small = name.removeprefix("small "), name.startswith("small ")
    return [
        row
        for row in measured(results)["rows"]
        if (row["op"], row["mode"]) == (op, mode) and row["shape"].startswith("small") == small
    ]


def ratios_of(arm: str, rows: list[dict[str, Any]]) -> list[float]:
    return [row["ratios"][arm][0] for row in rows if arm in row["ratios"]]


def test_speed_of_peers_is_what_was_measured() -> None:
    lines = PEERS.partition("| pass |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == 9
    for line in lines:
        name = line.split("|")[1].strip()
        cells = [name]
        for arm in PEER_ARMS:
            found = ratios_of(arm, grouped_rows(name))
            if found:
                slower = sum(ratio < 1 for ratio in found)
                cells += [f"{geomean(found):.3f}", f"{slower} of {len(found)}"]
            else:
                cells += ["-", "-"]
        assert line == "| " + " | ".join(cells) + " |"


def test_speed_of_grouped_gemms_is_what_was_measured() -> None:
    ops = {
        "dW in BF16": "dW",
        "dW in FP32": "dW fp32",
        "checkpointed step, early stop off": "ckpt",
        "checkpointed step, early stop on": "ckpt ES",
        "small fwd: E 8 to 64, 16 to 512 rows each": "small fwd",
    }
    lines = BENCHMARKS.partition("| pass | rows |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == 9
    for line in lines:
        name, count, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows = grouped_rows(ops.get(name, name))
        assert len(rows) == int(count)
        for cell, arm in zip(cells, PEER_ARMS, strict=True):
            found = ratios_of(arm, rows)
            if not found:
                assert cell == "-"
                continue
            mean = geomean(found)
            low, high = min(found), max(found)
            span = f"[{low:.2f}, {high:.2f}]" if high < 10 else f"[{low:.2f}, {high:.1f}]"
            assert cell.startswith(f"{mean:.2f} {span}"), (name, arm, f"{mean:.2f} {span}")


def test_speed_in_graphs_is_what_was_measured() -> None:
    def means(arm: str) -> list[str]:
        found = (ratios_of(arm, grouped_rows(op, "graph")) for op in PASSES)
        return [f"{geomean(of_op):.2f}" for of_op in found if of_op]

    text = " ".join(BENCHMARKS.split())
    assert "fwd {}, dgrad {} and dW {} over `torch._grouped_mm`".format(*means("torch")) in text
    assert "{}, {} and {} over cuBLAS".format(*means("cublas")) in text
    assert "{} and {} over DeepGEMM".format(*means("deepgemm")) in text


def test_noise_is_what_was_measured() -> None:
    rows = [row for row in measured("grouped")["rows"] if row["mode"] == "eager"]
    control = ratios_of("control", rows)
    text = " ".join(BENCHMARKS.split())
    assert f"itself gave {min(control):.2f} to {max(control):.2f} in a row" in text
    means = {
        op: geomean(ratios_of("control", [row for row in rows if row["op"] == op]))
        for op in {row["op"] for row in rows}
    }
    assert f"with early stop off, where it was {means.pop('ckpt'):.2f}" in text
    assert f"{min(means.values()):.2f} to {max(means.values()):.2f} in all passes but" in text


def test_figures_of_the_readme_are_those_of_the_tables() -> None:
    def span(arm: str, kind: str) -> str:
        found = (ratios_of(arm, grouped_rows(kind + op)) for op in PASSES)
        means = [f"{geomean(of_op):.2f}" for of_op in found if of_op]
        low, high = min(means), max(means)
        return low if low == high else f"{low} to {high}"

    text = " ".join((ROOT / "README.md").read_text().split())
    large, small = ({arm: span(arm, kind) for arm in PEER_ARMS} for kind in ("", "small "))
    assert f"`torch._grouped_mm` takes {large['torch']} times as long, a cuBLAS call" in text
    assert f"{large['cublas']} times, DeepGEMM {large['deepgemm']} times." in text
    assert f"takes {small['torch']} times as long, DeepGEMM {small['deepgemm']} times." in text


def test_speed_of_the_kernels_before_is_what_was_measured() -> None:
    text = " ".join(BENCHMARKS.split())

    def mean(op: str, mode: str = "graph") -> str:
        return f"{geomean(ratios_of('torch', grouped_rows(op, mode, 'grouped-earlier'))):.2f}"

    means = [mean(op) for op in ("dW fp32", "ckpt", "ckpt ES")]
    assert "steps gave {}, {} and {} over `torch._grouped_mm`".format(*means) in text
    rows = measured("grouped-earlier")["rows"]
    lowest = min(ratios_of("torch", [row for row in rows if row["shape"].startswith("small")]))
    assert f"the lowest {lowest:.2f}" in text and lowest > 1
    block = [mean(op, mode) for op in ("block", "block ES") for mode in ("eager", "graph")]
    assert "gave {} in eager and {} in graphs, with early stop {} and {}.".format(*block) in text


def test_lead_over_deepgemm_is_that_of_the_table() -> None:
    found = re.findall(r"^\| (?:small )?fwd \|.*\| (\d\.\d+) \| \d of \d+ \|$", PEERS, re.MULTILINE)
    assert min(map(float, found)) > 1
    large, small = (f"{100 * (float(ratio) - 1):.1f} %" for ratio in found)
    assert f"{large} slower on large rows and {small} on small ones" in PEERS


def test_host_times_are_what_was_measured() -> None:
    results = measured("host")
    rows = {(row["section"], row["mode"]): row for row in results["rows"]}
    for name, mode in (("without grad", "no grad"), ("with grad", "grad")):
        us = rows["grouped", mode]["median_us"]
        cells = [us[arm] for arm in ("cake", "torch.ops.cake", "torch._grouped_mm", "torch.mm")]
        assert f"| {' | '.join([name, *(f'{cell:.1f}' for cell in cells)])} |" in BENCHMARKS
    text = " ".join(BENCHMARKS.split())
    quiet = [rows["grouped", mode]["undisturbed_us"] for mode in ("no grad", "grad")]
    cake, torch = ([us[arm] for us in quiet] for arm in ("cake", "torch._grouped_mm"))
    assert "took {:.1f} and {:.1f} where `torch._grouped_mm`".format(*cake) in text
    assert "took {:.1f} and {:.1f}: ".format(*torch) in text
    shares = [a / b for a, b in zip(cake, torch, strict=True)]
    assert "{:.2f} and {:.2f} of its time".format(*shares) in text
    parts = results["breakdown"]["grouped_mm"]
    assert f"Of the {parts['whole call']:.1f} without grad" in text
    assert f"{parts['recognition']:.1f} are the recognition of the call" in text
    assert f"{parts['allocation']:.1f} the allocation" in text
    driver = parts["driver's launch"]
    assert f"{driver:.1f} the driver's launch" in text
    ours, theirs = (
        [f"{rows['router', m]['median_us'][arm]:.1f}" for m in ("fwd", "dgrad", "wgrad")]
        for arm in ("cake", "torch.mm")
    )
    assert f"take {ours[0]}, {ours[1]} and {ours[2]} where `torch.mm` takes" in text
    assert f"{theirs[0]}, {theirs[1]} and {theirs[2]}." in text
    no_grad, grad = (f"{rows['grouped', mode]['ratio']:.2f}" for mode in ("no grad", "grad"))
    router = [row["ratio"] for (section, _), row in rows.items() if section == "router"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{no_grad} of that of `torch._grouped_mm` without grad, {grad} with grad" in readme
    assert f"the router's {min(router):.1f} to {max(router):.2f} of" in readme


def test_speed_of_the_router_is_what_was_measured() -> None:
    results = measured("router")
    rows = [row for row in results["rows"] if row["mode"] == "graph"]

    def best(row: dict) -> float:
        return min(row["ratios"][arm][0] for arm in ("torch", "cublas", "cublaslt"))

    for op in ("fwd", "dgrad", "wgrad", "bwd", "2fwd+bwd"):
        cells = [op]
        for tokens in (64, 256, 1024):
            own = [r for r in rows if r["op"] == op and r["shape"].endswith(f"T{tokens}")]
            us = " / ".join(f"{row['arms']['cake']['median_us']:.1f}" for row in own)
            ratios = [best(row) for row in own]
            span = f"[{min(ratios):.2f}, {max(ratios):.2f}]"
            cells.append(f"{us} us: {geomean(ratios):.2f} {span}")
        assert "| " + " | ".join(cells) + " |" in BENCHMARKS
    ratios = [best(row) for row in rows]
    assert f"The geometric mean of all 45 is {geomean(ratios):.2f}." in BENCHMARKS
    text = " ".join(PEERS.split())
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} times as long" in text
    assert f"by geometric mean {geomean(ratios):.2f} over" in text


def test_speed_of_layers_is_what_was_measured() -> None:
    results = measured("layers")
    for row in results["rows"]:
        low = row["ratios"]["grouped_mm"]
        cells = f"| {row['shape'].replace(' tokens', '')} | {row['mode']} |"
        (line,) = [line for line in BENCHMARKS.splitlines() if line.startswith(cells)]
        assert f"| {row['arms']['cake']['tokens_per_s'] / 1e6:.3f} M |" in line
        assert f"| {low[0]:.2f} [{low[1]:.2f}, {low[2]:.2f}] |" in line
        if row["mode"] == "eager":
            slow = row["ratios"]["eager"]
            assert line.endswith(f"| {slow[0]:.2f} [{slow[1]:.2f}, {slow[2]:.2f}] |")
            arms = (row["arms"][arm]["peak_bytes"] for arm in ("cake", "grouped_mm", "eager"))
            assert f"| {', '.join(f'{peak / 2**30:.1f}' for peak in arms)} |" in line
        else:
            assert " M | - |" in line and line.endswith("| - |")
    text = " ".join(BENCHMARKS.split())
    for layer in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        own = [row["arms"] for row in results["rows"] if row["shape"] == f"{layer}, 8192 tokens"]
        cake, theirs = (
            max(arms[arm]["tokens_per_s"] for arms in own) for arm in ("cake", "grouped_mm")
        )
        assert f"{cake / theirs:.2f} times" in text and layer.removesuffix("-8x7B") in text


def test_accuracy_of_the_router_is_what_was_measured() -> None:
    results = measured("router")
    text = " ".join(BENCHMARKS.split())
    cake, torch = (
        max(row["arms"][arm]["rel_error"] for row in results["rows"]) for arm in ("cake", "torch")
    )
    assert f"error against FP64 is {cake:.1e}, that of `torch.mm` {torch:.1e}" in text
    tables = results["meta"]["experts unlike FP64's"]
    differ = {
        arm: sum(tables[f"H{hidden} {arm}"]["differ"] for hidden in (4096, 7168))
        for arm in ("cake", "torch", "tf32")
    }
    assert {table["tokens"] for table in tables.values()} == {106496} and differ["cake"] == 0
    assert f"(`torch.mm` in FP32: {differ['torch']}; TF32: {differ['tf32']})" in text
