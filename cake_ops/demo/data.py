"""Real English text without a download: the help pages that every Python carries in ``pydoc_data.topics``.

Pages repeat one another (the page on compound statements contains the page on ``for``), so a paragraph
seen before is dropped; otherwise the held-out text would partly be in the training text. Every tenth
page is then held out as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HELD_OUT_EVERY = 10  # pages


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out``: 1-D tensors of bytes (values 0..255, int64) on the device."""

    train: Tensor
    held_out: Tensor


def read_corpus(device: torch.device) -> Corpus:
    from pydoc_data.topics import topics

    seen: set[str] = set()
    pages: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(sorted(topics)):
        paragraphs = [p.strip("\n") for p in topics[name].split("\n\n")]
        new = [p for p in dict.fromkeys(paragraphs) if p and p not in seen]
        seen.update(new)
        pages[number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append("\n\n".join(new))

    def as_bytes(texts: list[str]) -> Tensor:
        text = bytearray("\n\n".join(texts).encode())
        return torch.frombuffer(text, dtype=torch.uint8).to(device, torch.int64)

    return Corpus(*map(as_bytes, pages))


def batch(
    text: Tensor, size: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``size`` random windows of ``text`` and the bytes that follow: two tensors [size, context]."""
    start = torch.randint(len(text) - context, (size,), generator=generator)
    return _windows(text, start, context)


def even_windows(text: Tensor, count: int, context: int) -> tuple[Tensor, Tensor]:
    """``count`` windows spread evenly over ``text``, the same ones every time."""
    return _windows(text, torch.linspace(0, len(text) - context - 1, count).long(), context)


def _windows(text: Tensor, start: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = start.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)
    window = text[index]
    return window[:, :-1], window[:, 1:]
