"""TMA tensor maps: how a kernel's bulk copies address an operand.

A map encodes an address and a geometry, not contents, so it stays valid however often the memory behind
it changes owner. Each :class:`MapTable` holds the maps of one geometry by address and number of rows (an
encode costs 2 us on the host of an H200); it is bounded and keeps no tensor alive.
"""

from __future__ import annotations

import threading
from typing import Any

from .driver import bind_context, check, driver
from .geometry import ROWS, TensorMapGeometry

MAX_ADDRESSES = 256
"""Maps kept for one geometry: more than the buffers a training step rotates through."""

_DTYPES = {"bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", "f32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32"}

Entry = tuple[int, Any]
"""``(pointer, owner)``: the pointer to the map is valid while the owner is held."""

Key = int | tuple[int, int]
"""The address, or ``(address, rows)`` where a dimension of the geometry is ``ROWS``."""


class MapTable:
    """The tensor maps of one geometry, by address and, where a dimension is ``ROWS``, number of rows."""

    __slots__ = ("_device", "_entries", "_geometry", "_lock", "get")

    def __init__(self, geometry: TensorMapGeometry, device: int) -> None:
        self._geometry, self._device = geometry, device
        self._entries: dict[Key, Entry] = {}
        self._lock = threading.RLock()  # what the garbage collector runs may come back here
        self.get = self._entries.get

    def add(self, key: Key) -> Entry:
        """Encodes the map of ``key`` and keeps it, in the place of the oldest one when full."""
        bind_context(self._device)  # the driver may refuse to encode in a thread without a context
        address, rows = (key, 0) if isinstance(key, int) else key
        entry = _encode(address, rows, self._geometry)
        with self._lock:
            if len(self._entries) >= MAX_ADDRESSES:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry
        return entry


def _encode(address: int, rows: int, geometry: TensorMapGeometry) -> Entry:
    cu = driver()
    rank = len(geometry.dims)
    owner = check(
        cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, _DTYPES[geometry.dtype]),
            rank,
            address,
            [cu.cuuint64_t(rows if n == ROWS else n) for n in geometry.dims],
            [cu.cuuint64_t(n) for n in geometry.strides],
            [cu.cuuint32_t(n) for n in geometry.box],
            [cu.cuuint32_t(1)] * rank,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{geometry.swizzle}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return owner.getPtr(), owner
