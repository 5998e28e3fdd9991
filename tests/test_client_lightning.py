"""PyTorch Lightning on cake_ops: its loops leave the same parameters as the loop written out, bit for bit.

Lightning calls the training step inside a closure that the optimizer runs, turns ``requires_grad`` of
parameters on and off, and accumulates into ``grad``. The model is the small MoE layer of ``moe``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from moe import HIDDEN, model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

lightning = pytest.importorskip("lightning.pytorch", reason="needs the client: lightning")

from cake_ops.testing import count_launches

pytestmark = pytest.mark.client

BATCHES = 4


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, 21, HIDDEN, generator=generator) for _ in range(BATCHES)]


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Automatic(lightning.LightningModule):
    """One optimizer, which runs forward and backward in its closure."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = model(experts=5)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        if self.checkpointed:
            y = checkpoint(self.layers, x, use_reentrant=False)
        else:
            y = self.layers(x)
        return (y - target).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class Checkpointed(Automatic):
    checkpointed = True


class Toggled(Automatic):
    """Manual optimization: routers and experts take turns, the others' parameters frozen meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.products: list[tuple[int, int, int]] = []

    def parts(self) -> list[list[nn.Parameter]]:
        named = list(self.layers.named_parameters())
        return [[p for n, p in named if ("router" in n) == router] for router in (True, False)]

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            with count_launches() as launches:
                loss = self.loss(*batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
            names = ("grouped_mm", "grouped_mm_wgrad", "router_mm_wgrad")
            self.products.append(tuple(launches[name] for name in names))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [sgd(part) for part in self.parts()]


def trained(module: Automatic, **options: Any) -> list[Tensor]:
    options |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return list(module.parameters())


def by_hand(module: Automatic, step: Callable[[Automatic, int, Tensor], None]) -> list[Tensor]:
    for index, batch in enumerate(batches()):
        step(module, index, batch)
    return list(module.parameters())


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    start = list(Automatic().parameters())
    assert all(map(torch.equal, got, want))
    assert not any(map(torch.equal, got, start))  # all of them have learned


@pytest.mark.parametrize("kind", [Automatic, Checkpointed])
@pytest.mark.parametrize(
    ("options", "every", "clip", "autocast"),
    [
        ({}, 1, None, False),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, 2, 0.5, False),
        ({"precision": "bf16-mixed"}, 1, None, True),
    ],
    ids=["plain", "accumulate-clip", "bf16-mixed"],
)
def test_automatic_optimization(
    kind: type[Automatic], options: dict[str, Any], every: int, clip: float | None, autocast: bool
) -> None:
    module = kind()
    optimizer = sgd(module.parameters())

    def step(module: Automatic, index: int, batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module.loss(*batch)
        (loss / every).backward()
        if (index + 1) % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    want = by_hand(module, step)
    with count_launches() as launches:
        assert_same(trained(kind(), **options), want)
    # Two layers of three products: up, its bias, down. Multiplying by the weights of the routing saves
    # the result of each layer's last one, so a checkpoint has to make them all again.
    assert launches["grouped_mm"] == BATCHES * (12 if kind.checkpointed else 6)
    assert launches["grouped_mm_wgrad"] == BATCHES * 6


def test_toggled_optimizers() -> None:
    module = Toggled()
    parts = module.parts()
    optimizers = [sgd(part) for part in parts]

    def step(module: Automatic, index: int, batch: Tensor) -> None:
        for i, optimizer in enumerate(optimizers):
            for p in parts[1 - i]:
                p.requires_grad_(False)
            optimizer.zero_grad()
            module.loss(*batch).backward()
            optimizer.step()
            for p in parts[1 - i]:
                p.requires_grad_(True)

    want = by_hand(module, step)
    module = Toggled()
    assert_same(trained(module), want)
    # forward, weight gradients of the experts, weight gradients of the routers: routers first
    assert module.products == [(6, 0, 2), (6, 6, 0)] * BATCHES
