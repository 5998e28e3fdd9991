# ruff: noqa: N999 (kernels finds a variant by the name of its folder)
"""What a variant must be: a module with ``layers``. They are the same on every device."""

from cake_ops.integrations.kernels import layers

__all__ = ["layers"]
