"""Layers for Hugging Face ``kernels``: ``kernelize`` puts the grouped GEMM into modules that others wrote.

``repository`` is a local kernel repository with a variant for the CPU and one for CUDA. Both hand out
``layers``, whose classes are forwards without state, as ``kernels`` demands. They run on the installed
package, so the repository is one for :class:`kernels.LocalLayerRepository`; the Hub takes only kernels that
bring all they need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels import LocalLayerRepository

__all__ = ["REPOSITORY", "mapping"]

REPOSITORY = Path(__file__).parent / "repository"
LAYERS = ("GroupedLinear", "Experts")


def mapping() -> dict[str, dict[str, LocalLayerRepository]]:
    """What ``kernels.use_kernel_mapping`` and ``kernels.register_kernel_mapping`` take.

    The layers are named ``CakeGroupedLinear`` and ``CakeExperts`` there, on "cpu" and on "cuda".

    Raises:
        ImportError: kernels is missing.
    """
    try:
        from kernels import LocalLayerRepository
    except ImportError as error:
        raise ImportError("cake_ops.integrations.kernels needs the package kernels") from error
    repositories = {layer: LocalLayerRepository(REPOSITORY, layer_name=layer) for layer in LAYERS}
    return {f"Cake{layer}": {"cpu": r, "cuda": r} for layer, r in repositories.items()}
