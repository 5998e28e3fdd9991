"""Launching: one plan for each geometry of a call, launched with the addresses of the moment.

A :class:`Plan` holds all of a launch that does not depend on where its operands lie: kernel, grid, scalar
arguments, and a table of tensor maps for each operand that is addressed through one. ``launch`` fills a
packed argument block with this call's addresses and calls the driver: 5 us on the host of an H200, of which
the driver takes 4. Blocks are taken from a pool, so threads never share one and nothing is locked.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from .config import TensorMapGeometry
from .driver import bind_context, check, driver, kernel
from .tensor_map import MapTable

MAX_STREAMS = 64

I32, I64, POINTER = "i", "q", "P"


class Plan:
    """A launch without its addresses.

    Args:
        name: the kernel.
        device: the device index.
        grid, threads, smem_bytes: of the launch; cluster dimensions are compiled into the kernel.
        maps: geometry of each tensor map; they are the kernel's first parameters.
        parameters: the kernel's other parameters in order: ``POINTER`` for one whose address comes
            with each launch, or ``(I32 or I64, value)``.
        programmatic: whether the launch may begin while the kernel before it still runs (PDL).
    """

    __slots__ = (
        "_configs",
        "_current_device",
        "_current_stream",
        "_launch",
        "_pack",
        "_pointers",
        "_pool",
        "_tables",
        "device",
        "grid",
        "handle",
        "name",
        "parameters",
        "programmatic",
        "smem_bytes",
        "threads",
    )

    def __init__(
        self,
        name: str,
        device: int,
        grid: int,
        threads: int,
        smem_bytes: int,
        maps: tuple[TensorMapGeometry, ...],
        parameters: tuple[Any, ...],
        programmatic: bool = False,
    ) -> None:
        self.name, self.device = name, device
        self.grid, self.threads, self.smem_bytes = grid, threads, smem_bytes
        self.parameters, self.programmatic = parameters, programmatic
        self.handle = kernel(name, device, smem_bytes)
        self._tables = tuple(MapTable(geometry, device) for geometry in maps)
        self._pointers = sum(p == POINTER for p in parameters)
        self._pack = struct.Struct(f"{self._pointers + len(maps)}Q").pack_into
        self._pool: list[tuple[Any, int]] = []
        self._configs: dict[int, Any] = {}
        self._launch = driver().cuLaunchKernelEx
        self._current_device = torch._C._cuda_getDevice  # not in CPU builds of torch
        self._current_stream = torch._C._cuda_getCurrentRawStream

    def launch(self, operands: tuple[int, ...], pointers: tuple[int, ...]) -> None:
        """Launches on torch's current stream of the device.

        Args:
            operands: the address behind each tensor map.
            pointers: the addresses of the ``POINTER`` parameters.
        """
        if self._current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(operands, pointers)
        maps = [
            table.get(address) or table.add(address)
            for table, address in zip(self._tables, operands, strict=True)
        ]
        try:
            block, table = self._pool.pop()
        except IndexError:
            block, table = self._new_block()
        self._pack(block, 0, *pointers, *[pointer for pointer, _ in maps])
        stream = self._current_stream(self.device)
        config = self._configs.get(stream) or self._new_config(stream)
        (status,) = self._launch(config, self.handle, table, 0)
        if status:  # a thread without a context, or a real failure, which comes again
            bind_context(self.device)
            check(self._launch(config, self.handle, table, 0))
        self._pool.append((block, table))

    def _new_block(self) -> tuple[Any, int]:
        """``(buffer, address of the argument table)``.

        The buffer holds the pointer values, then the table (one word for each kernel parameter, the
        address of its value), then the scalar values. A launch writes the pointer values and, right
        behind them, the table's first words: the addresses of the tensor maps.
        """
        count = len(self._tables) + len(self.parameters)
        block = (ctypes.c_uint64 * (self._pointers + count + len(self.parameters)))()
        base = ctypes.addressof(block)
        pointer, scalar = 0, self._pointers + count
        for i, parameter in enumerate(self.parameters):
            word = self._pointers + len(self._tables) + i
            if parameter == POINTER:
                block[word] = base + 8 * pointer
                pointer += 1
            else:
                block[word] = base + 8 * scalar
                struct.pack_into(parameter[0], block, 8 * scalar, parameter[1])
                scalar += 1
        return block, base + 8 * self._pointers

    def _new_config(self, stream: int) -> Any:
        cu = driver()
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.hStream = cu.CUstream(stream)
        if self.programmatic:
            attribute = cu.CUlaunchAttribute()
            attribute.id = (
                cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        if len(self._configs) >= MAX_STREAMS:
            self._configs.clear()
        self._configs[stream] = config
        return config
