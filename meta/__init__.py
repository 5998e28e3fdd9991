"""Fakes: what every operator means without its data, declared as one problem for each operator."""

from . import dense_mm, grouped_mm, router_mm

__all__ = ["dense_mm", "grouped_mm", "router_mm"]
