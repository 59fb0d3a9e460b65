"""The plain trainer: the same bits whatever the order, and not a word of fault tolerance in it."""

import ast
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import digests_of, events_of, tiny_config, tiny_trainer, trained
from torch import Tensor, nn

from outlast import checkpoint
from outlast.config import Config, load_config, to_toml
from outlast.data.corpus import open_corpus
from outlast.data.order import Samples, unit_batch
from outlast.errors import UserError
from outlast.events import EventLog
from outlast.models import build
from outlast.optim import learning_rate
from outlast.parallel import blocks
from outlast.trainer import Trainer

SOURCE = Path(checkpoint.__file__).parent


class Shuffled(Trainer):
    """Computes each step's units in another order."""

    def begin_step(self) -> Sequence[int]:
        """As the plain trainer's, shuffled."""
        return random.Random(self.step).sample(super().begin_step(), self.units)


class Spoilt(Trainer):
    """One unit of some steps has a loss or a gradient that isn't finite."""

    bad_steps: Sequence[int] = ()
    what = "loss"
    count = 0

    def loss(self, batch: Tensor) -> tuple[Tensor, int]:
        """As the plain trainer's, but for the third unit of a bad step."""
        loss, tokens = super().loss(batch)
        unit, self.count = self.count % self.units, self.count + 1
        if self.step + 1 in self.bad_steps and unit == 2:
            if self.what == "loss":
                return loss * float("inf"), tokens
            loss.register_hook(lambda g: g * float("inf"))
        return loss, tokens


class Dropped(Trainer):
    """With dropout after each feed-forward."""

    def build_model(self) -> nn.Module:
        """The usual one, with that."""
        model = super().build_model()
        for block in blocks(model):
            block.feed_forward = nn.Sequential(block.get_submodule("feed_forward"), nn.Dropout(0.2))
        return model


class ShuffledDropped(Dropped, Shuffled):
    """Both."""


def losses(config: Config) -> list[float]:
    """Logged loss of each step."""
    return [e["loss"] for e in events_of(config, "commit")]


def run(folder: Path, cls: type[Trainer] = Trainer, **overrides: Any) -> tuple[Config, Trainer]:
    """A whole tiny run."""
    config = tiny_config(folder, **overrides)
    return config, trained(config, cls)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_is_dropped_is_the_same_in_any_order_and_when_recomputed(tmp_path: Path, mode: str):
    _, dropped = run(tmp_path / "a", Dropped)
    _, shuffled = run(tmp_path / "b", ShuffledDropped, activation_checkpoint={"mode": mode})
    assert dropped.digests == shuffled.digests != {}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Trainer]:
    """The undisturbed tiny run."""
    return run(tmp_path_factory.mktemp("plain"))


# --- The trajectory --------------------------------------------------------------------------------


def test_the_order_of_units_changes_no_bit(tmp_path: Path, plain: tuple[Config, Trainer]):
    config, _ = run(tmp_path, Shuffled)
    assert [e["unit"] for e in events_of(config, "unit")] != [e["unit"] for e in events_of(plain[0], "unit")]
    assert digests_of(config) == digests_of(plain[0])
    assert losses(config) == losses(plain[0])


def test_float_sums_follow_the_exact_ones_closely(tmp_path: Path, plain: tuple[Config, Trainer]):
    config, trainer = run(tmp_path, training={"accumulation": "float"})
    assert losses(config) == pytest.approx(losses(plain[0]), rel=1e-4)
    for name, value in plain[1].state().items():
        assert torch.allclose(trainer.state()[name], value, rtol=1e-2, atol=1e-4), name


def test_the_seed_is_the_only_chance(tmp_path: Path, plain: tuple[Config, Trainer]):
    """The global generators decide nothing."""
    torch.manual_seed(99)
    random.seed(99)
    same, _ = run(tmp_path / "same")
    other, _ = run(tmp_path / "other", training={"seed": 1})
    assert digests_of(same) == digests_of(plain[0])
    assert not set(digests_of(other).values()) & set(digests_of(same).values())


def test_another_process_comes_to_the_same_bits(tmp_path: Path, plain: tuple[Config, Trainer]):
    """In another folder, with another hash seed, with curves: none of them is in the trajectory."""
    config = tiny_config(tmp_path / "run", metrics={"enable_tensorboard": True, "log_freq": 3})
    (tmp_path / "in.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "outlast.cli", "train", "--config", "in.toml"]
    env = {**os.environ, "PYTHONHASHSEED": "7", "OUTLAST_CACHE": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert digests_of(config) == digests_of(plain[0])
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/6", "3/6", "6/6"]
    shown = re.fullmatch(
        r"step 6/6  loss (\S+)  lr 3.00e-04  grad norm \d+\.\d{3}  [\d,]+ tokens/s  ETA 0:00", lines[-1]
    )
    assert shown and float(shown[1]) == pytest.approx(losses(config)[-1], abs=1e-4)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_training_is_what_the_textbook_says(plain: tuple[Config, Trainer]):
    """A loop of plain torch on whole batches: same data, token mean, clipping, schedule and AdamW."""
    config, trainer = plain
    t, o = config.training, config.optimizer
    corpus = open_corpus(config.data)
    samples = Samples(corpus, t.seq_len, t.seed)
    model = build(config.model, corpus.vocab_size, t.seq_len)
    model.init_weights(t.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)
    for event in events_of(config, "commit"):
        batch = torch.from_numpy(unit_batch(samples, (event["step"] - 1) * t.global_batch_size, t.global_batch_size))
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.max_norm)
        assert event["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert event["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert event["tokens"] == batch[:, 1:].numel()
        optimizer.param_groups[0]["lr"] = event["lr"]
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(trainer.state()[f"model.{name}"], p, rtol=1e-2, atol=1e-4), name


def test_every_sample_is_read_once_in_order_whatever_the_units(tmp_path: Path, plain: tuple[Config, Trainer]):
    """Cases C5 and C7: the data of a step is a range of the global order; every commit logs the whole batch."""
    coarse, _ = run(tmp_path, training={"local_batch_size": 4})
    for config, units in [(plain[0], 4), (coarse, 2)]:
        commits = events_of(config, "commit")
        assert [e["samples"] for e in commits] == [[8 * s, 8 * s + 8] for s in range(6)]
        assert {(e["units"], e["tokens"]) for e in commits} == {(units, 8 * 16)}
        read = sorted(tuple(e["samples"]) for e in events_of(config, "unit"))
        assert read == [(i * 8 // units, (i + 1) * 8 // units) for i in range(6 * units)]
    assert losses(coarse)[0] == pytest.approx(losses(plain[0])[0], rel=1e-6)


def test_bf16_runs_learns_and_repeats_itself(tmp_path: Path, plain: tuple[Config, Trainer]):
    found = []
    for name in ("one", "two"):
        config, trainer = run(tmp_path / name, training={"mixed_precision_param": "bfloat16"})
        found.append(digests_of(config))
        assert losses(config) == pytest.approx(losses(plain[0]), rel=0.02)
        assert {v.dtype for v in trainer.state().values()} == {torch.float32}
    assert found[0] == found[1] != digests_of(plain[0])


def test_the_loss_falls(tmp_path: Path):
    """The tiny corpus has 13 words in a pattern: far below the 5.5 nats of bytes that are drawn blindly."""
    config, _ = run(
        tmp_path,
        training={"steps": 60},
        optimizer={"lr": 2e-2},
        checkpoint={"enable": False},
        metrics={"digest_every": 0},
    )
    assert losses(config)[0] == pytest.approx(math.log(257), abs=0.5)
    assert losses(config)[-1] < 2.5
    assert set(digests_of(config)) == {60}  # the last is always there


# --- Gradients that aren't finite ------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", ["exact", "float"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_bad_gradient_skips_its_update_and_nothing_else(tmp_path: Path, accumulation: str, what: str):
    cls = type("SpoiltOnce", (Spoilt,), {"bad_steps": (3,), "what": what})
    config, _ = run(tmp_path, cls, training={"accumulation": accumulation})
    commits = events_of(config, "commit")
    assert [e["step"] for e in commits if e["skipped"]] == [3]
    if accumulation == "exact" or what == "loss":
        assert "[2]" in commits[2]["skipped"]
    assert commits[2]["grad_norm"] is None
    assert [e["lr"] for e in commits] == [learning_rate(step, config) for step in range(1, 7)]
    assert [e["samples"] for e in commits] == [[8 * s, 8 * s + 8] for s in range(6)]  # its data isn't read again
    digests = digests_of(config)
    assert digests[3] == digests[2]
    assert len(set(digests.values())) == 5
    assert all(math.isfinite(e["loss"]) for e in commits if not e["skipped"])


def test_a_skipped_update_is_the_same_decision_in_any_order(tmp_path: Path):
    found = []
    for name, bases in [("one", (Spoilt,)), ("two", (Shuffled, Spoilt))]:
        cls = type("SpoiltOnce", bases, {"bad_steps": (2, 4)})
        config = tiny_config(tmp_path / name)
        trainer = tiny_trainer(config, cls)
        trainer.train()
        found.append([bool(e["skipped"]) for e in events_of(config, "commit")])
    assert found[0] == found[1] == [False, True, False, True, False, False]


def test_too_many_skipped_updates_in_a_row_end_the_run(tmp_path: Path):
    cls = type("SpoiltLong", (Spoilt,), {"bad_steps": (1, 2, 4, 5, 6)})
    config = tiny_config(tmp_path, training={"steps": 9, "max_skipped_steps": 3})
    with pytest.raises(UserError, match=r"3 updates in a row.*at step 6") as e:
        trained(config, cls)
    assert "\n" not in str(e.value)
    assert [e["step"] for e in events_of(config, "commit")] == [1, 2, 3, 4, 5, 6]


# --- What it says ----------------------------------------------------------------------------------


def test_a_commit_is_said_before_the_update_is_applied(tmp_path: Path):
    """Who dies between the two has said it; who comes after must find it in the events."""

    class Watching(EventLog):
        trainer: Trainer

        def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
            if kind == "commit":
                seen.append(checkpoint.digest(self.trainer.state()))
            return super().emit(kind, **fields)

    seen: list[str] = []
    events = Watching(tmp_path, "g0.test", group=0, life="test", rank=0)
    config = tiny_config(tmp_path, training={"steps": 3})
    torch.set_num_threads(1)
    events.trainer = Trainer(config, events)
    before = checkpoint.digest(events.trainer.state())
    events.trainer.train()
    assert seen == [before, digests_of(config)[1], digests_of(config)[2]]


def test_the_start_says_what_is_about_to_run(plain: tuple[Config, Trainer]):
    config, trainer = plain
    (start,) = events_of(config, "start")
    assert (start["units"], start["unit_samples"], start["steps"], start["step"]) == (4, 2, 6, 0)
    assert start["parameters"] == sum(p.numel() for p in trainer.params)
    assert start["trajectory"]["corpus"] == trainer.corpus.hash
    assert start["trajectory"]["torch"] == torch.__version__
    assert start["trainer"] == "Trainer"


def test_the_run_folder_holds_the_config(plain: tuple[Config, Trainer]):
    config, trainer = plain
    assert load_config(trainer.run_dir / "config.toml") == config


# --- One way only: plain files know nothing of fault tolerance -------------------------------------

TORN = ("outlast.ft", "outlast.semisync", "outlast.launch", "outlast.sim", "torchft")


def plain_files() -> list[Path]:
    """All but the fault-tolerant parts, and what only reads their events."""
    files = [*SOURCE.glob("*.py"), *(SOURCE / "models").rglob("*.py"), *(SOURCE / "data").rglob("*.py")]
    assert len(files) > 15
    return sorted(files)


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported inside a function)."""
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, node in inside) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            for a in node.names:
                yield f"{node.module}.{a.name}", node in inside


def test_plain_files_import_no_fault_tolerance():
    found = {
        (str(file.relative_to(SOURCE)), name, lazy)
        for file in plain_files()
        for name, lazy in imports(ast.parse(file.read_text()))
        if any(name == torn or name.startswith(torn + ".") for torn in TORN)
    }
    assert found == {("rank.py", "outlast.ft.trainer.fault_tolerant", True)}


def test_the_plain_trainer_does_not_know_the_words():
    names = ("trainer", "accumulate", "parallel", "optim", "checkpoint", "metrics")
    files = [SOURCE / f"{name}.py" for name in names if (SOURCE / f"{name}.py").exists()]
    files += [*(SOURCE / "models").rglob("*.py"), *(SOURCE / "data").rglob("*.py")]
    words = re.compile("torchft|fault_tolerance|replica", re.IGNORECASE)
    assert not [
        f"{file}:{number}: {line}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if words.search(line)
    ]


def code_lines(files: Iterable[Path]) -> Iterator[list[str]]:
    """Lines of each file, without blank ones, comments, docstrings, imports and indentation."""
    for file in files:
        tree = ast.parse(file.read_text())
        left_out = set[int]()
        for node in ast.walk(tree):
            words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and (words or isinstance(node, ast.Import | ast.ImportFrom)):
                left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(file.read_text().splitlines(), 1)
        yield [" ".join(t.split()) for n, t in lines if n not in left_out and t.split("#")[0].strip()]


def runs_of(length: int, files: Iterable[Path]) -> set[tuple[str, ...]]:
    """All runs of so many lines in a row."""
    return {tuple(lines[i : i + length]) for lines in code_lines(files) for i in range(len(lines) - length + 1)}


def test_fault_tolerance_copies_nothing():
    """A copy misses every later fix of what it was copied from."""
    theirs = runs_of(6, (SOURCE / "ft").glob("*.py"))
    assert len(theirs) > 300
    assert not theirs & runs_of(6, plain_files())


def test_fault_tolerance_reads_in_an_hour():
    total = sum(len(file.read_text().splitlines()) for file in (SOURCE / "ft").glob("*.py"))
    assert 0 < total <= 1300
