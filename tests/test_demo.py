"""The demo: what it prints and writes, its model's mathematics, and how many GEMMs a step launches."""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import cake_ops
from cake_ops.demo import cli, main, train
from cake_ops.demo.data import read_corpus
from cake_ops.demo.experts import GROUPED_MM
from cake_ops.demo.model import Combine, Dispatch, ModelConfig, MoELanguageModel
from cake_ops.demo.report import Progress

SHAPE = ModelConfig(layers=2, width=16, heads=2, experts=5, top_k=2, hidden=24, context=32)
SMALL = [f"--{name}={getattr(SHAPE, name)}" for name in ("layers", "width", "heads", "experts")]
SMALL += ["--device=cpu", "--hidden=24", "--context=32", "--batch=2"]


def run(*options: str) -> train.Run:
    """The models of a small run, trained."""
    result, _ = cli.prepare(cli.parse([*SMALL, *options]))
    result.train(lambda _: None)
    return result


def model(grouped_mm=cake_ops.grouped_mm, device: str = "cpu") -> MoELanguageModel:
    torch.manual_seed(0)
    return MoELanguageModel(SHAPE, grouped_mm, torch.float32).to(device)


def forward_backward(lm: MoELanguageModel, device: str = "cpu") -> None:
    tokens = torch.randint(256, (2, SHAPE.context), device=device)
    logits, balance, _ = lm(tokens)
    (logits.square().mean() + logits.mean() + balance).backward()


def test_three_steps_end_to_end(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    assert main([*SMALL, "--steps=3", "--sample=20", f"--out={picture}"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        r"step 3/3  loss \d\.\d{3}",
        r"held-out loss, nats per byte +5\.545 +\d\.\d{3}\n",
        r"bits per byte +8\.000 +\d\.\d{3}\n",
        r" cake +torch +loop\n",
        r"training speed, tokens per second( +[\d,]+){3}\n",
        r"relative to cake +1\.00( +\d+\.\d\d){2}\n",
        r"largest difference to cake's loss +-( +0| +\d\.\de-\d\d){2}\n",
        r"forward grouped GEMMs in a step +6 +8\n",
        r"The model continues 'The '",
    ):
        assert re.search(expected, printed), (expected, printed)
    from matplotlib.image import imread

    image = imread(picture)
    assert image.shape[0] > 500 and image[..., :3].std() > 0.05


def test_training_lowers_the_held_out_loss():
    result = run("--steps=40", "--compare=none", "--batch=8", "--lr=0.02")
    assert result.held_out[40] < 4.0  # from 5.545


def test_the_same_seed_gives_the_same_losses():
    first, second, other = (run("--steps=3", "--compare=none", f"--seed={s}") for s in (7, 7, 8))
    assert first.cake.losses == second.cake.losses
    assert first.cake.losses != other.cake.losses


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_arms_agree(dtype, tolerance):
    """Other sums and, in BF16, one rounding more or less; what an update amplifies in 5 steps."""
    result = run("--steps=5", f"--dtype={dtype}")
    assert [arm.name for arm in result.arms] == ["cake", "torch", "loop"]
    cake, *others = (torch.tensor(arm.losses) for arm in result.arms)
    assert cake[0].sub(5.545).abs() < 1e-3 and len(cake) == 5
    for losses in others:
        torch.testing.assert_close(losses, cake, rtol=0, atol=tolerance)


def test_only_cake_goes_on_after_the_compared_steps():
    result = run("--steps=5", "--compare-steps=2")
    assert [len(arm.steps) for arm in result.arms] == [5, 2, 2]


def test_an_arm_that_cannot_run_is_named(capsys, tmp_path):
    options = ["--hidden=25", "--dtype=bf16", "--steps=1", "--sample=0", f"--out={tmp_path}/a.png"]
    assert main([*SMALL, *options]) == 0
    printed = capsys.readouterr().out
    assert (
        "torch does not run: its rows must be a multiple of 16 bytes, and --hidden makes 50"
        in printed
    )
    assert re.search(r"  +cake +loop\n", printed)


class SavesAfterLaunch(torch.autograd.Function):
    """cake's products behind an ordinary autograd.Function, which packs what it saves after forward."""

    @staticmethod
    def forward(ctx, x, w, offs):
        ctx.save_for_backward(x, w, offs)
        return cake_ops.grouped_mm(x, w, offs)

    @staticmethod
    def backward(ctx, g):
        x, w, offs = ctx.saved_tensors
        return cake_ops.grouped_mm_dgrad(g, w, offs), cake_ops.grouped_mm_wgrad(g, x, offs), None


def combine_inside(self, x, rotation):
    """Block.forward with the whole block in the checkpointed region."""

    def region(x):
        parts = self.up_to_down_projection(x, rotation)
        return self.combine(*parts), parts[-1]

    return checkpoint(region, x, use_reentrant=False)


# Forward GEMMs of a block: up and down, and what the backward runs again of the two. That is up alone if
# the recomputation stops at the down projection, and both otherwise.
@pytest.mark.parametrize(
    "early_stop, grouped_mm, combine_in_region, again",
    [
        pytest.param(True, cake_ops.grouped_mm, False, 1, id="early-stop"),
        pytest.param(False, cake_ops.grouped_mm, False, 2, id="no-early-stop"),
        pytest.param(True, cake_ops.grouped_mm, True, 2, id="combine-inside"),
        pytest.param(True, SavesAfterLaunch.apply, False, 2, id="saves-after-launch"),
    ],
)
def test_launches_of_a_step(monkeypatch, early_stop, grouped_mm, combine_in_region, again):
    lm = model(grouped_mm)
    if combine_in_region:
        monkeypatch.setattr(type(lm.blocks[0]), "forward", combine_inside)
    with set_checkpoint_early_stop(early_stop), cake_ops.testing.count_launches() as launches:
        forward_backward(lm)
    assert launches["grouped_mm"] == SHAPE.layers * (2 + again)
    assert launches["grouped_mm_dgrad"] == SHAPE.layers * 2
    assert launches["grouped_mm_wgrad"] == SHAPE.layers * 2
    assert (
        launches["router_mm"] == SHAPE.layers * 2
    )  # it lies before the last save, so always again


def test_checkpointing_changes_no_bit(monkeypatch):
    def gradients():
        lm = model()
        torch.manual_seed(1)
        forward_backward(lm)
        return [p.grad for p in lm.parameters()]

    with_early_stop = gradients()
    with set_checkpoint_early_stop(False):
        without_early_stop = gradients()
    monkeypatch.setattr("cake_ops.demo.model.checkpoint", lambda f, *args, **how: f(*args))
    for a, b, c in zip(with_early_stop, without_early_stop, gradients(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_model_reads_nothing_on_the_host():
    """Tensors of the meta device have no values, so a step on it ends only if none is asked for."""
    forward_backward(model(device="meta"), "meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        forward_backward(model(GROUPED_MM["loop"], "meta"), "meta")


def test_block_is_the_mixture_of_its_experts():
    """Against each token's own sum over its experts, without sorting, in FP64."""
    block = model().blocks[0]
    x = torch.randn(3, 7, SHAPE.width)
    rotation = torch.ones(7, 4), torch.zeros(7, 4)
    with torch.no_grad():
        y, routing = block(x, rotation)
        residual = x + block.attention(block.attention_norm(x), rotation)
        tokens = block.experts_norm(residual).flatten(0, 1).double()
        score = (tokens @ block.router.gate.weight.double().t()).softmax(-1)
        weight, expert = score.topk(SHAPE.top_k)
        expected = residual.flatten(0, 1).double()
        for t in range(len(tokens)):
            for w, e in zip(weight[t] / weight[t].sum(), expert[t].tolist(), strict=True):
                gate, value = (block.experts.up[e].double() @ tokens[t]).chunk(2)
                expected[t] += w * (block.experts.down[e].double() @ (F.silu(gate) * value))
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(routing.counts, torch.bincount(expert.flatten(), minlength=SHAPE.experts))


def test_dispatch_and_combine_have_the_gradients_of_indexing():
    top_k, tokens, width = 3, 5, 4
    order = torch.randperm(tokens * top_k)
    inverse = order.argsort()
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    y = torch.randn(tokens * top_k, width, dtype=torch.float64, requires_grad=True)
    assert torch.equal(Dispatch.apply(x, order, inverse, top_k), x[order // top_k])
    summed = torch.zeros_like(x).index_add(0, order // top_k, y)
    torch.testing.assert_close(Combine.apply(y, order, inverse, top_k), summed)
    assert torch.autograd.gradcheck(lambda x: Dispatch.apply(x, order, inverse, top_k), x)
    assert torch.autograd.gradcheck(lambda y: Combine.apply(y, order, inverse, top_k), y)


def test_the_position_limits_what_attention_sees():
    lm = model()
    torch.nn.init.normal_(lm.head)
    tokens = torch.randint(256, (1, 20))
    later = tokens.clone()
    later[0, 12:] = (later[0, 12:] + 1) % 256
    with torch.no_grad():
        a, b = lm(tokens)[0], lm(later)[0]
    torch.testing.assert_close(a[:, :12], b[:, :12])
    assert (a[:, 12:] - b[:, 12:]).abs().min(-1).values.gt(0).all()


def test_corpus_is_text_without_overlap():
    corpus = read_corpus(torch.device("cpu"))
    train_text, held_out = (bytes(t.tolist()).decode() for t in (corpus.train, corpus.held_out))
    assert 0.03 < len(held_out) / len(train_text) < 0.3
    assert train_text.count(" the ") > 1000
    assert not set(train_text.split("\n\n")) & set(held_out.split("\n\n"))


def test_ctrl_c_reports_what_was_done(monkeypatch, capsys, tmp_path):
    step = train.Arm.step

    def interrupted(arm, *args):
        if len(arm.steps) == 4 and arm.name == "torch":
            raise KeyboardInterrupt
        step(arm, *args)

    monkeypatch.setattr(train.Arm, "step", interrupted)
    picture = tmp_path / "stopped.png"
    assert main([*SMALL, "--steps=20", f"--out={picture}"]) == 130
    printed = capsys.readouterr().out
    assert re.search(
        r"stopped by Ctrl-C after [45] of 20 steps, at a training loss of 5\.\d{3}\n", printed
    )
    assert "medians of 2 whole steps each, in turn; loss: over the first 4 steps" in printed
    assert re.search(r"nats per byte +5\.545 +\d\.\d{3}", printed) and "step 4" in printed
    assert picture.exists() and "The model continues" not in printed


def test_ctrl_c_before_the_first_step(monkeypatch, capsys, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Run, "evaluate", interrupted)
    assert main([*SMALL, "--steps=2", f"--out={tmp_path}/none.png"]) == 130
    printed = capsys.readouterr().out
    assert "after 0 of 2 steps" in printed and "there is no picture" in printed
    assert re.search(r"nats per byte +- +-\n", printed)
    assert re.search(r"forward grouped GEMMs in a step +- +-\n", printed)


def test_ctrl_c_of_the_process(tmp_path):
    options = ["--steps=1000", "--compare=none", f"--out={tmp_path}/stopped.png"]
    command = [sys.executable, "-m", "cake_ops.demo", *SMALL, *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as process:
        for line in process.stdout:
            if line.startswith("step "):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "Traceback" not in out
    assert "stopped by Ctrl-C after" in out and "early stop of checkpoint" in out


def test_without_matplotlib_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "none.png"
    assert main([*SMALL, "--steps=1", "--sample=0", "--compare=none", f"--out={picture}"]) == 0
    assert "no picture:" in capsys.readouterr().out and not picture.exists()


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for action in cli.make_parser()._actions:
        if action.dest != "help":
            assert f"{action.option_strings[0]} " in printed
            assert "default: " in action.help and " ".join(action.help.split()) in printed


@pytest.mark.parametrize(
    "option, message",
    [
        ("--steps=0", "--steps: expected a number of at least 1, got 0"),
        ("--width=18", "--width 18: must be a multiple of 2 x --heads = 4"),
        ("--top-k=6", "--top-k 6: must not exceed --experts = 5"),
        ("--out=nowhere/a.png", "--out nowhere/a.png: there is no folder nowhere"),
        (
            "--compare=loop,cake",
            "--compare: expected torch, loop, torch,loop or none, got loop,cake",
        ),
    ],
)
def test_bad_options(option, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, option])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_context_longer_than_the_text():
    with pytest.raises(SystemExit, match=r"--context 1000000: only \d+ bytes are held out"):
        main([*SMALL, "--context=1000000"])


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal):
    out = Terminal() if terminal else io.StringIO()
    result, _ = cli.prepare(cli.parse([*SMALL, "--steps=30", "--compare=none"]))
    progress = Progress(30, out)
    for step in range(30):
        result.cake.steps.append(train.Step(5.0 - step / 10, 0.5, torch.ones(2, 5)))
        progress.drawn = 0.0  # as if the last redraw were long ago
        progress(result)
    progress.close()
    text = out.getvalue()
    assert "step 30/30  loss 2.100  128 tokens/s" in text and text.endswith("\n")
    if terminal:
        first, *_, last = text.removeprefix("\r").split("\r")
        assert text.count("\r") == 30 and text.count("\n") == 1
        assert first.count("░") > 20 and "█" in last and "░" not in last
    else:
        assert text.count("\n") == 10 and "\r" not in text
        assert "step 27/30  loss 2.400  128 tokens/s  2 s left" in text


def test_compiled_whole(monkeypatch, tmp_path, capsys):
    """fullgraph and the compiler's removal of the unused GEMM; without inductor, to save a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    options = ["--compile", "--dtype=bf16", "--steps=3", "--sample=0", f"--out={tmp_path}/a.png"]
    assert main([*SMALL, *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"forward grouped GEMMs in a step +6 +6\n", printed)
    assert "loop runs eagerly: it reads the counts on the host" in printed
    assert "torch runs eagerly" not in printed and "cake runs eagerly" not in printed
