"""CPU kernels, one module for each family: any floating dtype, size, stride and alignment.

They are the backend of tests and of machines without a GPU. Products accumulate in FP32 or wider and
round once; every result is deterministic.
"""

from . import dense_mm, grouped_mm, router_mm

__all__ = ["dense_mm", "grouped_mm", "router_mm"]
