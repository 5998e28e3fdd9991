"""CUDA backend, one module for each family. Importing it starts no CUDA context."""

from . import dense_mm, grouped_mm, router_mm

__all__ = ["dense_mm", "grouped_mm", "router_mm"]
