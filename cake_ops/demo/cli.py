"""``python -m cake_ops.demo``: the options, and the order of events."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .data import read_corpus
from .experts import why_not_run
from .model import ModelConfig
from .report import Progress, opening, summary
from .train import Arm, Run, TrainConfig, sample

STOPPED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROMPT = "The "

# option -> (default on the CPU, default on CUDA, help). The CPU sizes train in about a minute on two
# cores; the CUDA sizes give every expert enough rows for its GEMM to matter.
SIZES: dict[str, tuple[Any, Any, str]] = {
    "steps": (500, 200, "training steps"),
    "batch": (16, 32, "windows of text in a step"),
    "context": (128, 256, "bytes in a window"),
    "layers": (2, 4, "transformer blocks"),
    "width": (128, 512, "width of the residual stream"),
    "heads": (4, 8, "attention heads"),
    "experts": (8, 16, "experts in a block"),
    "top-k": (2, 2, "experts that each byte is sent to"),
    "hidden": (128, 512, "hidden width of an expert"),
    "lr": (3e-3, 1e-3, "peak learning rate"),
}
DESCRIPTION = """\
Trains a small byte-level mixture-of-experts language model with cake_ops on the text of Python's own
help pages, and compares it with the same model on torch's grouped GEMM and on a loop over the experts.
Prints a summary, continues a sentence, and writes a picture. Ctrl-C ends it early with the summary of
what was done (exit code 130)."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cake_ops.demo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    sizes = parser.add_argument_group("sizes")
    for name, (cpu, cuda, text) in SIZES.items():
        (parser if name == "steps" else sizes).add_argument(
            f"--{name}",
            type=float if name == "lr" else _positive,
            metavar="X" if name == "lr" else "N",
            help=f"{text}; default: {cpu} on the CPU, {cuda} on CUDA",
        )
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to train; default: auto, CUDA where there is a GPU",
    )
    add(
        "--dtype",
        choices=tuple(DTYPES),
        help="of the activations; default: bf16 on CUDA (the only choice there), fp32 on the CPU",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the weights, the batches and the sample; default: 0",
    )
    add(
        "--threads",
        type=_positive,
        metavar="N",
        help="CPU threads; default: half of the cores (where another program takes one of two cores,"
        " two threads that wait for each other are ten times as slow as one)",
    )
    add(
        "--compile",
        action="store_true",
        help="use torch.compile(fullgraph=True); default: eager",
    )
    add(
        "--compare",
        default="torch,loop",
        metavar="ARMS",
        help="what to run beside cake: torch, loop, torch,loop or none; default: torch,loop",
    )
    add(
        "--compare-steps",
        type=_positive,
        default=60,
        metavar="N",
        help="for how many steps; default: 60",
    )
    add(
        "--sample",
        type=int,
        default=200,
        metavar="N",
        help="bytes of text to write at the end; default: 200",
    )
    add(
        "--out",
        type=Path,
        default=Path("cake_demo.png"),
        metavar="PNG",
        help="the picture to write; default: cake_demo.png",
    )
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(argv)
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        parser.error("--device cuda: torch sees no CUDA device")
    on_cuda = options.device == "cuda" or (options.device == "auto" and has_cuda)
    options.device = "cuda" if on_cuda else "cpu"
    if on_cuda and options.dtype == "fp32":
        parser.error("--dtype fp32: the grouped GEMM takes bf16 on CUDA")
    options.dtype = options.dtype or ("bf16" if on_cuda else "fp32")
    for name, defaults in SIZES.items():
        key = name.replace("-", "_")
        if getattr(options, key) is None:
            setattr(options, key, defaults[on_cuda])
    arms = [] if options.compare == "none" else options.compare.split(",")
    if not set(arms) <= {"torch", "loop"} or len(set(arms)) < len(arms):
        parser.error(f"--compare: expected torch, loop, torch,loop or none, got {options.compare}")
    options.compare = arms
    if options.width % (2 * options.heads):
        parser.error(
            f"--width {options.width}: must be a multiple of 2 x --heads = {2 * options.heads}"
        )
    if options.top_k > options.experts:
        parser.error(f"--top-k {options.top_k}: must not exceed --experts = {options.experts}")
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    return options


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def prepare(options: argparse.Namespace) -> tuple[Run, dict[str, str]]:
    """The models and the text; and why an arm that was asked for does not run."""
    shape = ModelConfig(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        experts=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        context=options.context,
    )
    config = TrainConfig(
        device=torch.device(options.device),
        dtype=DTYPES[options.dtype],
        steps=options.steps,
        compare_steps=min(options.compare_steps, options.steps),
        batch=options.batch,
        lr=options.lr,
        seed=options.seed,
        compile=options.compile,
    )
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    corpus = read_corpus(config.device)
    if len(corpus.held_out) <= shape.context:
        raise SystemExit(
            f"--context {shape.context}: only {len(corpus.held_out)} bytes are held out"
        )
    not_run = {a: why_not_run(a, config.dtype, shape) for a in options.compare}
    names = ["cake", *(arm for arm in options.compare if not not_run[arm])]
    arms = [Arm(name, shape, config) for name in names]
    return Run(shape, config, corpus, arms), {
        arm: reason for arm, reason in not_run.items() if reason
    }


def measure(run: Run) -> None:
    """All that is worth interrupting."""
    if run.config.compile:
        print("compiling ...", flush=True)
    run.evaluate()
    run.count_forward_launches()
    progress = Progress(run.config.steps, sys.stdout)
    try:
        run.train(progress)
    finally:
        progress.close()


def write_picture(run: Run, path: Path) -> None:
    if not run.cake.steps:
        return print("no step was finished, so there is no picture")
    try:
        from .plot import draw

        draw(run, path)
    except ImportError as error:
        return print(f"no picture: {error} (pip install 'cake-ops[demo]' brings matplotlib)")
    print(f"picture: {path}")


def demo(options: argparse.Namespace) -> int:
    run, not_run = prepare(options)
    print(opening(run, not_run), flush=True)
    stopped = False
    try:
        measure(run)
    except KeyboardInterrupt:
        stopped = True
        reached = f", at a training loss of {run.cake.losses[-1]:.3f}" if run.cake.steps else ""
        print(
            f"\nstopped by Ctrl-C after {len(run.cake.steps)} of {run.config.steps} steps{reached}"
        )
    print("", summary(run), "", sep="\n", flush=True)
    write_picture(run, options.out)
    if options.sample > 0 and not stopped:
        print(f"\nThe model continues {PROMPT!r}:\n")
        print(sample(run, PROMPT, options.sample))
    return STOPPED if stopped else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit code: 0, or 130 after Ctrl-C."""
    options = parse(argv)
    try:
        return demo(options)
    except KeyboardInterrupt:  # before training, or once more during the report
        print("\nstopped")
        return STOPPED
