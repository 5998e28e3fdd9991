"""Launching: one plan for each geometry of a call, launched with the addresses and rows of the moment.

A :class:`Plan` holds all of a launch that depends neither on where its operands lie nor on the exact number
of their rows: kernel, grid, scalar arguments, and a table of tensor maps for each operand. ``Plan.run`` fills
a packed argument block with this call's addresses and rows, and calls the driver; it allocates the result
too, if there is none. Blocks are taken from a pool, so threads never share one and nothing is locked. Both
families of kernels are launched by it: the grouped ones, which take offsets, and the router's, which do not.

Every launch allows programmatic dependent launch: the kernel may begin while the one before it ends, and
waits for it before its first global access. Back to back in a CUDA graph on an H200, 8 groups of 64 rows,
N = K = 1024, take 6.0 us each instead of 7.2, and the router's three products with 64 tokens, H = 4096 and 256
experts 5.5 instead of 6.0. In eager the host spares as well: the driver takes 5.3 us for a grouped launch instead of
6.0, 3.4 for one of the router instead of 4.2.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from .driver import bind_context, check, driver, kernel
from .geometry import ROWS, TensorMapGeometry
from .tensor_map import MapTable

MAX_STREAMS = 64  # launch configurations kept by a plan: one a stream and number of CTAs

try:
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided
except ImportError:  # a torch whose compiler allocates in another way

    def empty_strided(
        sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


I32, I64, POINTER = "i", "q", "P"

Block = tuple[Any, int]
"""``(buffer, address of the argument table in it)``."""

Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a result; where the first size is ``ROWS``, it is a matrix with these rows."""


class Plan:
    """A launch without its addresses.

    The kernel's first parameters are the tensor maps of its operands and, in a family that stores through
    one, of its result. Among the others are, in this order, pointers to the result and to the offsets (in a
    family without them to both operands), and the rows: the first size of the call's first operand.

    Args:
        name: the kernel.
        device: the device index.
        grid, threads, smem_bytes: of the launch; cluster dimensions are compiled into the kernel.
        maps: geometry of the tensor maps of operand a, operand b and, if it has one, the result (wgrad).
        parameters: the other parameters in order: ``POINTER``, ``(I32 or I64, value)``, where the value
            ``ROWS`` stands for the rows.
        result: what ``run`` allocates.
        tile_rows: if given, the launch has ``grid`` CTAs for each ``tile_rows`` rows, the last ones begun.
        max_ctas: but no more than these, if given.
        swapped: the kernel takes the call's operands in the other order; ``maps`` has the kernel's.

    Attributes:
        run: ``(out, a, b, offs)``, or ``(out, a, b)`` in a family without offsets,
            launches on torch's current stream of the device and returns ``out``, or a new tensor for None.
    """

    __slots__ = ("run",)

    def __init__(
        self,
        name: str,
        device: int,
        grid: int,
        threads: int,
        smem_bytes: int,
        maps: tuple[TensorMapGeometry, ...],
        parameters: tuple[Any, ...],
        result: Result,
        tile_rows: int | None = None,
        max_ctas: int | None = None,
        swapped: bool = False,
    ) -> None:
        # The launch is one closure: attribute look-ups and calls cost 0.9 of its 6.5 us. It refers
        # neither to itself nor to the plan: training loops switch the garbage collector off, and an
        # evicted plan must go all the same.
        handle = kernel(name, device, smem_bytes)
        tables = [MapTable(geometry, device) for geometry in maps]
        maps_a, maps_b, maps_out = (*tables, None)[:3]
        find_a, find_b, find_out = maps_a.get, maps_b.get, maps_out and maps_out.get
        a_has_rows, b_has_rows = (ROWS in geometry.dims for geometry in maps[:2])
        written = sum(map(_is_written, parameters))
        pack = struct.Struct(f"{written + len(maps)}Q").pack_into
        launch = driver().cuLaunchKernelEx
        exchange_device = torch._C._cuda_exchangeDevice  # not in CPU builds of torch
        current_stream = torch._C._cuda_getCurrentRawStream
        sizes, strides, dtype = result
        result_has_rows, columns = sizes[0] == ROWS, sizes[-1]
        pool: list[Block] = []
        configs: dict[Any, Any] = {}

        def run(out: Tensor | None, a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
            before = exchange_device(device)
            try:
                rows = a.shape[0]
                if out is None:
                    # On the current device and, as in inductor's code, past the dispatcher: on a CPU that
                    # takes half the time of new_empty.
                    shape = (rows, columns) if result_has_rows else sizes
                    out = empty_strided(shape, strides, dtype)
                to = out.data_ptr()
                if swapped:
                    a, b = b, a
                at_a, at_b = a.data_ptr(), b.data_ptr()
                key_a = (at_a, rows) if a_has_rows else at_a
                key_b = (at_b, rows) if b_has_rows else at_b
                map_a = find_a(key_a) or maps_a.add(key_a)
                map_b = find_b(key_b) or maps_b.add(key_b)
                try:
                    block = pool.pop()
                except IndexError:
                    block = _new_block(parameters, written, len(maps))
                if offs is None:
                    pack(block[0], 0, to, at_a, at_b, rows, map_a[0], map_b[0])
                elif maps_out is None:
                    pack(block[0], 0, to, offs.data_ptr(), rows, map_a[0], map_b[0])
                else:
                    map_out = find_out(to) or maps_out.add(to)
                    pack(block[0], 0, to, offs.data_ptr(), rows, map_a[0], map_b[0], map_out[0])
                stream = current_stream(device)
                ctas = grid
                if tile_rows:
                    ctas *= -(-rows // tile_rows)
                if max_ctas and ctas > max_ctas:
                    ctas = max_ctas
                config = configs.get((stream, ctas))
                if config is None:
                    if len(configs) >= MAX_STREAMS:
                        configs.clear()
                    config = _new_config(ctas, threads, smem_bytes, stream)
                    configs[stream, ctas] = config
                (status,) = launch(config, handle, block[1], 0)
                if status:  # a thread without a context, or a real failure, which comes again
                    bind_context(device)
                    check(launch(config, handle, block[1], 0))
                pool.append(block)
                return out
            finally:
                if before != device:
                    exchange_device(before)

        self.run = run


def _is_written(parameter: Any) -> bool:
    """Whether each launch writes it: pointers and rows."""
    return parameter in (POINTER, (I32, ROWS))


def _new_block(parameters: tuple[Any, ...], written: int, maps: int) -> Block:
    """A buffer of the values that each launch writes, the argument table, and the other values.

    The table has one word for each kernel parameter, the address of its value. A launch writes its
    pointers and rows and, right behind them, the table's first words: the addresses of the maps.
    """
    table = written
    values = table + maps + len(parameters)
    block = (ctypes.c_uint64 * (values + len(parameters)))()
    base = ctypes.addressof(block)
    value = 0
    for i, parameter in enumerate(parameters):
        if _is_written(parameter):
            block[table + maps + i] = base + 8 * value
            value += 1
        else:
            block[table + maps + i] = base + 8 * (values + i)
            struct.pack_into(parameter[0], block, 8 * (values + i), parameter[1])
    return block, base + 8 * table


def _new_config(grid: int, threads: int, smem_bytes: int, stream: int) -> Any:
    cu = driver()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.hStream = cu.CUstream(stream)
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config
