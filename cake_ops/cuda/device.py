"""What the launcher needs to know of a device: whether it has kernels, and how many SMs."""

from __future__ import annotations

import functools

import torch

KERNELS_FOR = (9, 0)  # sm_90a: H100, H200, GH200


@functools.cache
def no_kernels_reason(device: int) -> str:
    """Why the device is served by torch; empty if it has kernels of its own."""
    capability = torch.cuda.get_device_capability(device)
    if capability == KERNELS_FOR:
        return ""
    name = torch.cuda.get_device_name(device)
    return f"no kernels yet for {name} (sm_{capability[0]}{capability[1]}), only for sm_90"


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
