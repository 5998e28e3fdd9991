"""Writes docs/api.md from the docstrings of the package: ``make docs``.

The sources are read and not imported, so the page does not depend on what is installed, and a module
whose framework is missing has its place in it. A page section is one source file; what it shows are the
names in the file's ``__all__``, in the order in which the file defines them. ``tests/test_docs.py``
compares the page with what this makes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/api.md"

SECTIONS = {  # title: (module of the names, source file)
    "Grouped GEMM": ("cake_ops", "grouped_mm.py"),
    "Router GEMM": ("cake_ops", "router_mm.py"),
    "Dense and batched GEMM": ("cake_ops", "dense_mm.py"),
    "Launches": ("cake_ops", "runtime.py"),
    "Router configurations": ("cake_ops", "routing.py"),
    "Modules": ("cake_ops.nn", "nn.py"),
    "Drop-in for torch.nn.functional": ("cake_ops.functional", "functional.py"),
    "Expert parallelism": ("cake_ops.distributed", "distributed.py"),
    "transformers": ("cake_ops.integrations.transformers", "integrations/transformers.py"),
    "torchtitan": ("cake_ops.integrations.torchtitan", "integrations/torchtitan.py"),
    "Hugging Face kernels": ("cake_ops.integrations.kernels", "integrations/kernels/__init__.py"),
    "Profiling": ("cake_ops.profiling", "profiling.py"),
    "Testing": ("cake_ops.testing", "testing.py"),
}
INTRODUCTION = """\
# API

<!-- Made by docs/generate_api.py from the docstrings: change those, then run `make docs`. -->

The same operators are `torch.ops.cake.<name>`; the forms with `out=` are `torch.ops.cake.<name>_out` there.
Rules that hold for all functions of a section stand at its beginning.
"""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


def render() -> str:
    """The page."""
    sections = [_section(title, *section) for title, section in SECTIONS.items()]
    links = "\n".join(f"- [{title}](#{_anchor(title)})" for title in SECTIONS)
    return "\n".join([INTRODUCTION, links, "", *sections])


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(title: str, module: str, file: str) -> str:
    source = (ROOT / "cake_ops" / file).read_text()
    tree = ast.parse(source)
    parts = [f"## {title}", _markdown(ast.get_docstring(tree) or "")]
    for name, node, docstring in _public(tree, file):
        parts += _definition(f"{module}.{name}", node, docstring)
    return "\n\n".join(filter(None, parts)) + "\n"


def _public(tree: ast.Module, file: str) -> Iterator[tuple[str, Definition, str]]:
    """``(name, definition, docstring)`` of the names in ``__all__``; re-exported ones come first."""
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            folder = (ROOT / "cake_ops" / file).parent
            origin = folder / f"{node.module.replace('.', '/')}.py"
            wanted = {alias.name for alias in node.names} & set(names)
            if wanted:
                yield from _definitions(ast.parse(origin.read_text()), wanted)
    yield from _definitions(tree, names)


def _definitions(tree: ast.Module, names: set[str] | list[str]) -> Iterator:
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            yield node.name, node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            yield ast.unparse(node.targets[0]), node, text


def _definition(path: str, node: Definition, docstring: str) -> list[str]:
    head = f"### {path}"
    if isinstance(node, ast.FunctionDef):
        return [head, _signature(node.name, node), _markdown(docstring)]
    if isinstance(node, ast.Assign):
        return [head, _code(ast.unparse(node)), _markdown(docstring)]
    methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
    made = next((m for m in methods if m.name == "__init__"), None)
    fields = [ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign)]
    if made:
        signature = _signature(node.name, made)
    elif any("dataclass" in ast.unparse(d) for d in node.decorator_list) and fields:
        signature = _call(node.name, fields)
    else:
        signature = _call(f"class {node.name}", [ast.unparse(base) for base in node.bases])
    parts = [head, signature, _markdown(docstring)]
    for method in methods:
        text = ast.get_docstring(method)
        if text and not method.name.startswith("_"):
            parts += [_signature(f"{node.name}.{method.name}", method), _markdown(text)]
    return parts


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _signature(name: str, function: ast.FunctionDef) -> str:
    result = ast.unparse(function.returns) if function.returns else ""
    if any(ast.unparse(d) == "contextmanager" for d in function.decorator_list):
        name = f"with {name}"
    return _call(name, _parameters(function.args), "" if function.name == "__init__" else result)


def _call(name: str, parameters: list[str], result: str = "") -> str:
    """One line if it fits, else a line for each parameter."""
    result = f" -> {result}" if result else ""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){result}"
    return _code(line)


def _parameters(arguments: ast.arguments) -> list[str]:
    def typed(argument: ast.arg, default: ast.expr | None = None) -> str:
        text = argument.arg
        if argument.annotation:
            text += f": {ast.unparse(argument.annotation)}"
        if default:
            text += (" = " if argument.annotation else "=") + ast.unparse(default)
        return text

    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    made = [typed(*pair) for pair in zip(plain, defaults, strict=True)]
    if plain and plain[0].arg in ("self", "cls") and not plain[0].annotation:
        made = made[1:]
    if arguments.vararg:
        made.append("*" + typed(arguments.vararg))
    elif arguments.kwonlyargs:
        made.append("*")
    made += [typed(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return made + (["**" + typed(arguments.kwarg)] if arguments.kwarg else [])


# Docstrings are written for a reader of the source; what follows turns their few forms into Markdown.


def _markdown(docstring: str) -> str:
    blocks = re.split(r"\n\s*\n(?!\s)", docstring.strip())
    return "\n\n".join(map(_block, blocks))


def _block(block: str) -> str:
    first, _, rest = block.partition("\n")
    if first.startswith("===="):
        return _table(block)
    if re.fullmatch(r"(Args|Attributes|Raises):", first):
        return f"**{first}**\n\n{_entries(rest)}"
    if re.fullmatch(r"[A-Z][\w ]*:", first) and rest.startswith("    "):
        return f"**{first}**\n\n{_inline(dedent(rest))}"
    text, example, code = block.partition("::\n\n")
    if example:
        return f"{_inline(text)}:\n\n{_code(dedent(code))}"
    return _inline(block)


def _entries(text: str) -> str:
    """``name: words`` with continuation lines, as a list."""
    entry = re.compile(r"^([*\w]+(?:, [*\w]+)*):", re.MULTILINE)
    text = _inline(re.sub(r"\n\s+", r"\n  ", dedent(text)))
    return entry.sub(lambda m: f"- `{m[1].replace(', ', '`, `')}`:", text)


def _table(block: str) -> str:
    """Columns under rules of equals signs, the head between the first two."""
    lines = block.splitlines()
    starts = [match.start() for match in re.finditer("=+", lines[0])]

    def row(line: str) -> str:
        cells = (line[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True))
        return "|".join(["", *(f" {_inline(cell.strip())} " for cell in cells), ""])

    head, *rest = [line for line in lines if not line.startswith("====")]
    return "\n".join([row(head), "|---" * len(starts) + "|", *map(row, rest)])


def _inline(text: str) -> str:
    text = re.sub(r":(?:func|class|mod|data|meth):`~?\.?([^`]+)`", r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(render())
