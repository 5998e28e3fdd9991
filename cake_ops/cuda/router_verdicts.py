"""Which configuration of the router kernel serves a call: overrides, measured verdicts, else the model.

A verdict names a configuration for an operator on a GPU, for given sizes and a window of T. They come in
three layers, and the first that matches a call serves it: overrides of this process, the user's own
measurements (files in the user's cache, one for each GPU and version of the package), and those shipped with
the package (``router_verdicts.json``). A call without a verdict is served by the cost model.

T counts by bucket (:func:`cake_ops.cuda.geometry.rows_bucket`), as it does for the launch: a window reaches to
the ends of the buckets that its bounds lie in.

Every change of the table raises its ``generation``, which is part of the key of every planned launch. So
a verdict is used from the very next call on, and no plan made under another one is found again.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .._eager import forget_calls
from .geometry import MAX_SIZE, rows_bucket
from .router_config import (
    LAYOUTS,
    MAX_CHAIN,
    MAX_CLUSTER_K,
    Dtype,
    RouterConfig,
    all_configs,
    is_valid,
    select_config,
)

SHIPPED = Path(__file__).with_name("router_verdicts.json")


@dataclass(frozen=True)
class RouterRoute:
    """A verdict: ``config`` serves calls of ``op`` that fit all of the rest.

    Attributes:
        op: ``"router_mm"``, ``"router_mm_dgrad"`` or ``"router_mm_wgrad"``, in all their forms.
        config: name of the kernel's configuration. Its second word, ``f32`` or ``bf16``, is the dtype of
            the operand it serves: x in the forward and the weight gradient.
        N, H: experts and hidden size; None: any.
        min_T, max_T: window of the number of tokens, both ends included; None: no upper end.
        gpu: name of the GPU, as torch gives it; None: any.
        us: the measured time, if it was measured.
        source: ``"override"``, ``"tuned"`` or ``"shipped"``.
    """

    op: str
    config: str
    N: int | None = None
    H: int | None = None
    min_T: int = 1
    max_T: int | None = None
    gpu: str | None = None
    us: float | None = None
    source: str = "override"

    def check(self) -> None:
        """Raises ``RuntimeError`` if it cannot serve."""
        if self.op not in LAYOUTS:
            raise RuntimeError(f"cake_ops: op must be one of {', '.join(LAYOUTS)}, got {self.op!r}")
        for name, size in (("N", self.N), ("H", self.H), ("max_T", self.max_T)):
            if size is not None and not (isinstance(size, int) and 1 <= size <= MAX_SIZE):
                raise RuntimeError(f"cake_ops: {name} must be None or from 1 to 2^30, got {size}")
        if not (isinstance(self.min_T, int) and 1 <= self.min_T <= (self.max_T or MAX_SIZE)):
            raise RuntimeError(
                f"cake_ops: min_T must be from 1 to max_T = {self.max_T}, got {self.min_T}"
            )
        config, layout = named_configs().get(self.config), LAYOUTS[self.op]
        if config is None or config.layout != layout:
            names = (name for name, c in named_configs().items() if c.layout == layout)
            raise RuntimeError(
                f"cake_ops: the configurations of {self.op} are {', '.join(names)}, got {self.config!r}"
            )
        N, H = self.N or 1, self.H or 1
        if not is_valid(config, self.min_T, N, H):
            raise RuntimeError(
                f"cake_ops: {self.config} serves no call of T >= {self.min_T}, N = {self.N or 'any'},"
                f" H = {self.H or 'any'}: it takes at most 2^30 CTAs and, in a weight gradient whose"
                f" tokens are not split over {MAX_CLUSTER_K} CTAs, {MAX_CHAIN} tokens a CTA"
            )

    def matches(self, gpu: str, op: str, b_dtype: Dtype, T: int, N: int, H: int) -> bool:
        """Whether a call fits, ``T`` being a bucket."""
        config = named_configs()[self.config]
        return (
            self.op == op
            and config.b_dtype == b_dtype
            and self.gpu in (None, gpu)
            and self.N in (None, N)
            and self.H in (None, H)
            and rows_bucket(self.min_T) <= T
            and (self.max_T is None or T <= rows_bucket(self.max_T))
            and is_valid(config, T, N, H)
        )


@cache
def named_configs() -> dict[str, RouterConfig]:
    return {config.name: config for config in all_configs()}


class Verdicts:
    """The table of this process. Reading it is free of locks: each layer is replaced as a whole.

    Attributes:
        generation: raised *after* each change, so that a key with the new one never meets the old table.
    """

    __slots__ = ("_layers", "_lock", "generation")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, tuple[RouterRoute, ...]] = {"override": ()}
        self.generation = 0

    def routes(self) -> list[RouterRoute]:
        """Every verdict, in the order in which a call looks for its own. The first call reads the files."""
        layers = self._layers
        if "shipped" not in layers:
            with self._lock:
                layers = self._layers = {
                    "override": self._layers["override"],
                    "tuned": _read_tuned(),
                    "shipped": _parsed(json.loads(SHIPPED.read_text()), "shipped"),
                }
        return [route for layer in layers.values() for route in layer]

    def choose(
        self, gpu: str, op: str, b_dtype: Dtype, T: int, N: int, H: int, num_sms: int
    ) -> tuple[RouterConfig, str]:
        """The configuration of a call and what chose it; ``T`` is a bucket.

        Raises:
            RuntimeError: no configuration computes the problem.
        """
        for route in self.routes():
            if route.matches(gpu, op, b_dtype, T, N, H):
                return named_configs()[route.config], route.source
        return select_config(op, T, N, H, b_dtype, num_sms), "cost model"

    def override(self, route: RouterRoute) -> None:
        """Puts a verdict before all others."""
        route.check()
        with self._lock:
            self._layers = {**self._layers, "override": (route, *self._layers["override"])}
            self.generation += 1
        forget_calls()

    def reset(self) -> None:
        """Forgets the overrides, and reads the files anew."""
        with self._lock:
            self._layers = {"override": ()}
            self.generation += 1
        forget_calls()

    def forget_files(self) -> None:
        with self._lock:
            self._layers = {"override": self._layers["override"]}
            self.generation += 1
        forget_calls()


TABLE = Verdicts()


# ---- the user's measurements ----


def cache_dir() -> Path:
    """Where the measurements made by this version of the package lie."""
    from .. import __version__

    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which includes the empty one
        base = os.path.expanduser("~/.cache")
    return Path(base) / "cake_ops" / __version__


def tuned_file(gpu: str) -> Path:
    return cache_dir() / f"router-{re.sub('[^A-Za-z0-9]+', '-', gpu)}.json"


def store_verdicts(gpu: str, routes: Iterable[RouterRoute]) -> Path:
    """Replaces the user's measurements for ``gpu``; they serve from the next call on.

    Returns:
        the file.
    """
    rows: list[dict[str, Any]] = []
    for route in routes:
        route.check()
        row = asdict(route)
        del row["source"]
        rows.append({**row, "gpu": gpu})
    path = tuned_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)  # another process reads the old file or the new one
    TABLE.forget_files()
    return path


def _read_tuned() -> tuple[RouterRoute, ...]:
    routes: list[RouterRoute] = []
    for path in sorted(cache_dir().glob("router-*.json")):
        try:
            routes += _parsed(json.loads(path.read_text()), "tuned")
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            warnings.warn(
                f"cake_ops: {path} is not used ({error}); delete it, or write it anew with"
                " python -m cake_ops.bench router --tune",
                stacklevel=2,
            )
    return tuple(routes)


def _parsed(rows: list[dict[str, Any]], source: str) -> tuple[RouterRoute, ...]:
    routes = tuple(RouterRoute(**row, source=source) for row in rows)
    for route in routes:
        route.check()
    return routes
