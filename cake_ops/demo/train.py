"""Training of the compared models: same text, same batches, same first weights, one grouped GEMM each.

For the first ``compare_steps`` steps every arm takes each batch in turn (the order rotates), which gives
both the losses to compare and step times taken under the same conditions. After that cake goes on alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from cake_ops.testing import count_launches

from .data import Corpus, batch, even_windows
from .experts import GROUPED_MM, why_not_compiled
from .model import ModelConfig, MoELanguageModel

WARMUP_STEPS = 2  # not timed: allocators, caches and, with compile, the compilation
BALANCE_WEIGHT = 0.01  # of the load-balancing loss
HELD_OUT_WINDOWS = 64
EVALUATIONS = 10  # during training


@dataclass(frozen=True)
class TrainConfig:
    device: torch.device
    dtype: torch.dtype
    steps: int
    compare_steps: int
    batch: int
    lr: float
    seed: int
    compile: bool


class Step(NamedTuple):
    loss: float  # cross-entropy, nats per byte
    seconds: float  # forward, backward and optimizer
    load: Tensor  # rows of each expert [layers, E]


class Arm:
    """One copy of the model with its own grouped GEMM, optimizer and record."""

    def __init__(self, name: str, model_config: ModelConfig, config: TrainConfig) -> None:
        self.name = name
        self.device = config.device
        torch.manual_seed(config.seed)
        model = MoELanguageModel(model_config, GROUPED_MM[name], config.dtype)
        self.model = model.to(config.device)
        self.why_eager = why_not_compiled(name, config.dtype) if config.compile else "no --compile"
        self.forward = self.model if self.why_eager else torch.compile(self.model, fullgraph=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.steps: list[Step] = []

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the gradients in the parameters; returns the cross-entropy and the load."""
        logits, balance, load = self.forward(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        (loss + BALANCE_WEIGHT * balance).backward()
        return loss.detach(), load

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> None:
        start = self._now()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, load = self.forward_backward(tokens, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = self._now() - start
        self.steps.append(Step(loss.item(), seconds, load))

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def seconds(self) -> list[float]:
        return [step.seconds for step in self.steps]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass
class Run:
    """Everything the report needs, filled as far as training got."""

    model_config: ModelConfig
    config: TrainConfig
    corpus: Corpus
    arms: list[Arm]  # cake first
    held_out: dict[int, float] = field(default_factory=dict)  # step -> nats per byte
    forward_launches: dict[bool, int] = field(default_factory=dict)  # early stop -> launches

    @property
    def cake(self) -> Arm:
        return self.arms[0]

    def evaluate(self) -> None:
        """Loss of cake's model on the same held-out windows every time."""
        model = self.cake.model
        tokens, targets = even_windows(
            self.corpus.held_out, HELD_OUT_WINDOWS, self.model_config.context
        )
        with torch.no_grad():
            logits = model(tokens)[0]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        self.held_out[len(self.cake.steps)] = loss.item()

    def count_forward_launches(self) -> None:
        """Runs one step's forward and backward with early stop on, one with it off, and counts."""
        tokens, targets = batch(
            self.corpus.train, self.config.batch, self.model_config.context, torch.Generator()
        )
        for early_stop in (True, False):
            with set_checkpoint_early_stop(early_stop), count_launches() as launches:
                self.cake.forward_backward(tokens, targets)
            self.forward_launches[early_stop] = launches["grouped_mm"]
            self.cake.optimizer.zero_grad()

    def train(self, on_step: Callable[[Run], None]) -> None:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        evaluate_every = max(1, config.steps // EVALUATIONS)
        for step in range(config.steps):
            tokens, targets = batch(
                self.corpus.train, config.batch, self.model_config.context, generator
            )
            arms = self.arms if step < config.compare_steps else [self.cake]
            turn = step % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                arm.step(tokens, targets, learning_rate(step, config))
            if (step + 1) % evaluate_every == 0 or step + 1 == config.steps:
                self.evaluate()
            on_step(self)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up over 20 steps, then a cosine down to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.lr * min((step + 1) / 20, 0.1 + 0.9 * cosine)


@torch.no_grad()
def sample(run: Run, prompt: str, length: int, top: int = 8, temperature: float = 0.8) -> str:
    """Continues ``prompt`` by ``length`` bytes drawn from cake's model, ``top`` likeliest bytes each."""
    generator = torch.Generator().manual_seed(run.config.seed)
    tokens = torch.tensor([list(prompt.encode())], device=run.config.device)
    for _ in range(length):
        logits = run.cake.model(tokens[:, -run.model_config.context :])[0][0, -1].float()
        value, index = logits.topk(top)
        chance = (value / temperature).softmax(0).cpu()
        choice = index[torch.multinomial(chance, 1, generator=generator).to(index.device)]
        tokens = torch.cat((tokens, choice[None]), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
