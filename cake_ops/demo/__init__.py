"""The main job: train a small mixture-of-experts language model with cake_ops and measure it.

Run ``python -m cake_ops.demo --help``. :mod:`~cake_ops.demo.model` is the part to read first: it shows
how the operators are used in a model, and where a checkpointed region should end.
"""

from .cli import main

__all__ = ["main"]
