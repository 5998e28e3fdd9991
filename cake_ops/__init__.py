"""cake_ops: PyTorch operators for training Mixture-of-Experts models.

Ragged grouped GEMM, the FP32 router GEMM, and dense and batched projection GEMMs, registered as
``torch.ops.cake.*``. Start with :func:`grouped_mm` and :func:`router_mm`; ``cake_ops.nn`` has modules,
``cake_ops.functional`` a drop-in for ``torch.nn.functional.grouped_mm``. Importing this package starts no
CUDA context.
"""

from importlib.util import find_spec

if find_spec(f"{__name__}.meta") is None:
    raise ImportError(
        f"{__path__[0]} is the source tree of cake_ops, which holds neither cake_ops.meta nor the"
        " kernels. Install it editable (pip install -e .), or keep its folder off sys.path: after a"
        " plain install run pytest, not python -m pytest."
    )

from ._library import NAMESPACE as NAMESPACE  # first: it stops a second copy of the package

# These register fakes, gradients, rules and backends.
from . import meta as meta, _formulas as _formulas, _rules as _rules  # isort: skip
from . import cpu as cpu, cuda as cuda  # isort: skip
from . import functional, nn, profiling, testing
from .dense_mm import (
    batched_mm,
    batched_mm_dgrad,
    batched_mm_wgrad,
    dense_mm,
    dense_mm_dgrad,
    dense_mm_wgrad,
    linear,
)
from .grouped_mm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad, grouped_mm_wgrad_
from .router_mm import router_mm, router_mm_dgrad, router_mm_wgrad, router_mm_wgrad_, split_bf16x3
from .routing import RouterRoute, reset_router_routes, router_routes, set_router_route
from .runtime import Explanation, Prepared, clear_caches, explain, prepare, warmup

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Prepared",
    "RouterRoute",
    "__version__",
    "batched_mm",
    "batched_mm_dgrad",
    "batched_mm_wgrad",
    "clear_caches",
    "dense_mm",
    "dense_mm_dgrad",
    "dense_mm_wgrad",
    "explain",
    "functional",
    "grouped_mm",
    "grouped_mm_dgrad",
    "grouped_mm_wgrad",
    "grouped_mm_wgrad_",
    "linear",
    "nn",
    "prepare",
    "profiling",
    "reset_router_routes",
    "router_mm",
    "router_mm_dgrad",
    "router_mm_wgrad",
    "router_mm_wgrad_",
    "router_routes",
    "set_router_route",
    "split_bf16x3",
    "testing",
    "warmup",
]
