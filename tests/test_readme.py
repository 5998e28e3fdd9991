"""README and CONTRIBUTING hold: the snippets run, and the commands, names and files they mention exist."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import cake_ops
from cake_ops._library import OPS

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
ALL = "\n".join(TEXTS.values())
GPU_GUARD = "\nif torch.cuda.is_available():\n"


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """``(line number, text)`` of every fenced block in ``language``."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


SNIPPETS = [  # on the CPU, and on a GPU those that mention one
    pytest.param(line, source, device, marks=marks, id=f"line-{line}-{device}")
    for line, source in blocks(TEXTS["README.md"], "python")
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    if (GPU_GUARD not in source if device == "cpu" else "cuda" in source)
]


def commands() -> list[str]:
    """Every command line of the shell blocks, and in running text the commands that begin with make."""
    lines = [
        line.split("#")[0].strip()
        for text in TEXTS.values()
        for _, block in blocks(text, "bash")
        for line in block.splitlines()
    ]
    inline = re.findall(r"`([^`\n]*\bmake [^`\n]*)`", re.sub(r"(?s)^```.*?^```$", "", ALL))
    return [re.sub(r"^(\w+=\S+ )+", "", line) for line in (*lines, *inline) if line]


def words(pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, ALL)))


@pytest.fixture
def one_compiler_thread() -> Iterator[None]:
    """A pool of compiler processes takes longer to start than a small graph takes to compile."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.parametrize(("line", "source", "device"), SNIPPETS)
def test_snippet_runs(
    line: int,
    source: str,
    device: str,
    tmp_path: Path,
    one_compiler_thread: None,
    request: pytest.FixtureRequest,
) -> None:
    if device == "cpu":
        request.getfixturevalue("unseen_gpu")
    assert re.search(r"\bassert(_close)?\b|\.assert_", source), "a snippet shows what it claims"
    script = tmp_path / "README.py"
    script.write_text("\n" * line + source)  # a traceback gives the line of the README
    runpy.run_path(str(script), run_name="__main__")


def test_the_uses_that_people_look_for_have_a_snippet() -> None:
    sources = "\n".join(source for _, source in blocks(TEXTS["README.md"], "python"))
    for use in (
        "checkpoint(",
        "count_launches(",
        "torch.compile(",
        "torch.cuda.graph(",
        "cake_ops.warmup(",
        "cake_ops.functional import grouped_mm",
        "RouterLinear(",
        "cake_ops.explain(",
        "cake_ops.prepare(",
    ):
        assert use in sources


def test_table_of_operators_is_complete() -> None:
    table = TEXTS["README.md"].partition("## Operators")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:cake_ops\.)?(\w+)\(", table))
    assert named - {"linear"} == {name for name in OPS if not name.endswith("_out")}


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_target_exists(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in re.sub(r'"[^"]*"', "", command).split()[1:]:
        name, is_variable, _ = argument.partition("=")
        pattern = rf"\$\({name}\)" if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), argument


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python -m cake_ops")])
def test_module_takes_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, module, *arguments = command.split()
    subcommand = [word for word in arguments[:1] if not word.startswith("-")]
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"{module}.__main__").main([*subcommand, "--help"])
    assert exit_.value.code == 0
    usage = capsys.readouterr().out
    for option in (word for word in arguments if word.startswith("--")):
        assert re.search(rf"{option}\b", usage), f"{module} has no {option}"


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    known = r"make |python -m cake_ops\.|pip install |pytest\b|pre-commit install|\.ci/run"
    assert len(commands()) > 10
    assert [command for command in commands() if not re.match(known, command)] == []


@pytest.mark.parametrize("name", words(r"\bcake_ops(?:\.\w+)+(?!\w*[./]\w)"))
def test_name_exists(name: str) -> None:
    _, *attributes = name.split(".")
    found = cake_ops
    for attribute in attributes:
        if not hasattr(found, attribute):
            importlib.import_module(f"{found.__name__}.{attribute}")
        found = getattr(found, attribute)


@pytest.mark.parametrize(
    "path",
    words(r"`((?:csrc|meta|cake_ops|tests|\.ci)/[\w./*<>]*|[\w.]+\.(?:toml|yaml|txt|cmake))`"),
)
def test_file_exists(path: str) -> None:
    assert list(ROOT.glob(re.sub(r"<\w+>", "*", path).rstrip("/")))
