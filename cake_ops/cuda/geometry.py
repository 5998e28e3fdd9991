"""What the plans of both families share: limits of a launch, buckets of rows, and how a tensor map is described.

Nothing here imports torch or CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["nt", "nn", "tn"]

SMEM_LIMIT = 232448  # 227 KB, all that one Hopper CTA can have
MAX_SIZE = (
    1 << 30
)  # of each dimension; a ragged group's rows count down from here in the tensor map
ROWS = -1  # in the place of a size: the rows (M, the router's T) of each launch


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def rows_bucket(M: int) -> int:
    """Rounds M up to three significant bits.

    A launch is planned for a bucket of M and told M itself, so that token counts which change from step
    to step share a plan. It chose another configuration in 0.2 % of 20,000 random problems.
    """
    shift = M.bit_length() - 3
    return -(-M >> shift) << shift if shift > 0 else M


def bucket_range(M: int) -> tuple[int, int]:
    """The first and the last number of rows in the bucket of ``M``."""
    last = rows_bucket(M)
    return last + 1 - (1 << max((last - 1).bit_length() - 3, 0)), last


@dataclass(frozen=True)
class TensorMapGeometry:
    """What cuTensorMapEncodeTiled needs besides the address: innermost dimension first.

    A dimension of ``ROWS`` is the first size of the call's first operand, which comes with each launch.
    ``strides`` are in bytes and begin with the second dimension. Every map has element strides of one, no
    interleave, an L2 promotion to 256 bytes and zero fill out of bounds; those of the grouped GEMMs have the
    128-byte swizzle.
    """

    dtype: Literal["bf16", "f32"]
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"

    @property
    def rank(self) -> int:
        return len(self.dims)
