"""What a user adds: a trainer, a config section, callbacks, an evaluation. None of it knows of fault tolerance."""

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import digests_of, events_of, tiny_config, tiny_trainer, trained

from outlast import saves
from outlast.audit import audit
from outlast.callbacks import Callback, Evaluation, Step
from outlast.classes import config_class, load_trainer
from outlast.config import Config, load_config, to_toml
from outlast.errors import ConfigError
from outlast.events import read_events
from outlast.trainer import Trainer

ROOT = Path(__file__).parent.parent
FLOW = ["--config", "examples/flow_matching/config.toml", "--metrics.digest_every=10"]


def outlast(*args: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    command = [sys.executable, "-P", "-m", "outlast.cli", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, env={**os.environ})


def digest(run_dir: Path) -> str:
    """Of a finished run."""
    done = saves.done_marker(run_dir)
    assert done, "it isn't finished"
    return done["digest"]


# --- A trainer of one's own, found or refused ------------------------------------------------------

MODULES = {
    "fine.py": "from outlast.trainer import Trainer\nclass Fine(Trainer): ...\nclass Half(Trainer):\n"
    "    def open_data(self) -> None: ...\n",
    "raises.py": "import os\n\n1/0\n",
    "quits.py": "raise SystemExit(3)\n",
    "dies.py": "import os\nos._exit(7)\n",
    "words.py": "def f(:\n",
    "needs.py": "import not_there\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with modules in it."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("nowhere:Mine", "no module nowhere"),
        ("fine:Fin", "did you mean Fine?"),
        ("fine:os", "no os in"),
        ("json:JSONDecoder", "isn't a subclass of outlast.trainer.Trainer"),
        ("raises:Mine", "raises.py:3: ZeroDivisionError"),
        ("quits:Mine", "quits.py:1: SystemExit"),
        ("words:Mine", "words.py:1: SyntaxError"),
        ("needs:Mine", "needs.py:1: No module named 'not_there'"),
        ("fine:Half", "is missing data_facts, batch, build_model"),
        ("fine", "expected module:Class"),
    ],
)
def test_a_trainer_that_cannot_be_used_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, why: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as said:
        load_trainer(spec)
    assert why in str(said.value)


def test_train_refuses_it_before_anything_is_made(folder: Path) -> None:
    said = outlast("train", "--trainer", "raises:Mine", cwd=folder)
    assert said.returncode == 2
    assert "raises.py:3" in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("spec", "why"), [("raises:Mine", "raises.py:3"), ("dies:Mine", "ends the process: exit 7")])
def test_launch_refuses_it_too(folder: Path, spec: str, why: str) -> None:
    said = outlast("launch", f"--trainer={spec}", cwd=folder)
    assert said.returncode == 2
    assert why in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
    assert not (folder / "runs").exists()


# --- The example -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run of it, undisturbed."""
    run_dir = tmp_path_factory.mktemp("flow") / "plain"
    said = outlast("train", *FLOW, "--training.steps=60", f"--job.run_dir={run_dir}")
    assert said.returncode == 0, said.stderr
    return run_dir


def test_flow_matching_survives_kills_to_the_same_bits(flow: Path, tmp_path: Path) -> None:
    said = outlast(
        *("launch", *FLOW, "--training.steps=60", "--run-dir", tmp_path / "run", "--groups=3"),
        *("--trainer", "examples.flow_matching:FlowTrainer"),
        *("--chaos", "kill g1 at step 15; kill g0 at step 30"),
    )
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr
    found = audit(read_events(tmp_path / "run"))
    assert not found.broken and found.finished
    assert sorted(i.group for i in found.incidents if i.kind == "kill" and i.group is not None) == [0, 1]
    assert digest(tmp_path / "run") == digest(flow)
    assert (tmp_path / "run" / "samples.png").read_bytes() == (flow / "samples.png").read_bytes()


def test_flow_matching_on_groups_of_two_ranks(tmp_path: Path) -> None:
    said = outlast(*("launch", *FLOW, "--training.steps=6", "--run-dir", tmp_path, "--groups=2", "--ranks-per-group=2"))
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr
    assert not audit(read_events(tmp_path)).broken
    assert (tmp_path / "samples.png").exists()


@pytest.mark.parametrize("command", ["train", "launch"])
def test_own_settings_have_help_names_and_checks(command: str) -> None:
    said = outlast(command, *FLOW, "--help")
    assert said.returncode == 0 and "--flow.width" in said.stdout and "Of the residual stream." in said.stdout
    said = outlast(command, *FLOW, "--flow.widht=3")
    assert said.returncode == 2 and "did you mean --flow.width?" in said.stderr
    said = outlast(command, *FLOW, "--flow.samples=5")
    assert said.returncode == 2 and said.stderr == "outlast: [flow]: samples = 5: expected a square number\n"


def test_own_settings_decide_the_trajectory_unless_they_say_otherwise(flow: Path) -> None:
    again = ["train", *FLOW, "--training.steps=60", f"--job.run_dir={flow}"]
    said = outlast(*again, "--flow.sampling_steps=3")
    assert said.returncode == 0 and "nothing to do" in said.stdout
    said = outlast(*again, "--flow.width=32")
    assert said.returncode == 2 and "flow.width = 64, this one has 32" in said.stderr


# --- Callbacks -------------------------------------------------------------------------------------


class Hostile(Callback):
    """Leaves everything that it can reach in another state."""

    def on_step(self, step: Step) -> None:
        with pytest.raises(AttributeError):
            step.loss = 0.0  # pyright: ignore[reportAttributeAccessIssue]
        torch.manual_seed(step.step)
        torch.randn(3)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        random.seed(1)
        (self.run_dir / "told").open("a").write(f"{step.step}\n")


class Broken(Callback):
    """Raises at its second step."""

    def on_step(self, step: Step) -> None:
        if step.step == 2:
            raise ValueError("not\nmine")
        assert step.step == 1, "it is off"


def test_a_callback_cannot_change_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = tiny_config(tmp_path / "quiet")
    trained(quiet)
    before = torch.get_rng_state()
    told = tiny_config(tmp_path / "told", job={"callbacks": (f"{__name__}:Broken", f"{__name__}:Hostile")})
    trained(told)
    assert digests_of(told) == digests_of(quiet)
    assert (tmp_path / "told" / "told").read_text().split() == ["1", "2", "3", "4", "5", "6"]
    assert torch.equal(torch.get_rng_state(), before)
    said = [line for line in capsys.readouterr().err.splitlines() if "switched off" in line]
    assert len(said) == 1 and "Broken" in said[0] and "ValueError: not mine" in said[0]


def test_callbacks_are_a_list_in_toml_and_flags(tmp_path: Path) -> None:
    config = load_config(None, ["--job.callbacks=a:A,b:B"])
    assert config.job.callbacks == ("a:A", "b:B")
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml") == config
    assert load_config(None, []).job.callbacks == ()
    (tmp_path / "bad.toml").write_text("[job]\ncallbacks = [1]\n")
    with pytest.raises(ConfigError, match="list of strings"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_callback_that_is_not_there_is_refused_before_anything_starts(folder: Path, command: str) -> None:
    said = outlast(command, "--job.callbacks=fine:Fine", cwd=folder)
    assert said.returncode == 2 and "isn't a subclass of outlast.callbacks.Callback" in said.stderr
    assert not (folder / "runs").exists()


# --- Evaluation ------------------------------------------------------------------------------------


class Evaluated(Trainer):
    """Looks at its loss on a batch, and draws random numbers."""

    def evaluate(self) -> dict[str, float]:
        assert not self.model.training and not torch.is_grad_enabled()
        torch.manual_seed(self.step)
        loss, tokens = self.loss(self.batch(range(2)).to(self.device))
        return {"loss": float(loss) / tokens, "odd": math.inf}


class Listener(Callback):
    """Writes down what it is told."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        with pytest.raises(TypeError):
            evaluation.values["loss"] = 0.0  # pyright: ignore[reportIndexIssue]
        (self.run_dir / "told").open("a").write(f"{evaluation.step} {evaluation.values['loss']:.4f}\n")


def test_an_evaluation_is_told_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = tiny_config(tmp_path / "quiet")
    trained(quiet)
    config = tiny_config(
        tmp_path / "told", job={"callbacks": (f"{__name__}:Listener",)}, metrics={"evaluate_every": 4, "log_freq": 1000}
    )
    before = torch.get_rng_state()
    trainer = trained(config, Evaluated)
    assert torch.equal(torch.get_rng_state(), before) and trainer.model.training
    assert digests_of(config) == digests_of(quiet)
    found = events_of(config, "evaluation")
    assert [e["step"] for e in found] == [4, 6], "every 4 steps and at the end"
    assert all(e["values"]["odd"] is None and e["values"]["loss"] > 0 for e in found)
    assert "step 4: evaluation: loss " in capsys.readouterr().out
    told = [f"{e['step']} {e['values']['loss']:.4f}" for e in found]
    assert (tmp_path / "told" / "told").read_text().splitlines() == told
    assert not events_of(quiet, "evaluation"), "no trainer of ours has one"


# --- docs/extending.md -----------------------------------------------------------------------------

FILES = sorted(path for path in (ROOT / "examples" / "extending").glob("*.py") if path.name != "__init__.py")


def test_the_docs_show_the_files_as_they_are() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"`(examples/\S+)`:\n\n```python\n(.*?)```\n", text, re.DOTALL)
    assert sorted(name for name, _ in shown) == [str(path.relative_to(ROOT)) for path in FILES]
    for name, code in shown:
        assert code == (ROOT / name).read_text(), name


@pytest.mark.parametrize(
    "spec", ["model:RecurrentTrainer", "trainer:SmoothTrainer", "dataset:CountingTrainer", "section:NoiseTrainer"]
)
def test_what_the_docs_show_trains_and_resumes_to_the_same_bits(tmp_path: Path, spec: str) -> None:
    spec = f"examples.extending.{spec}"
    cls = load_trainer(spec)
    callbacks = "examples.extending.callback:Table"

    def config(name: str, steps: int) -> Config:
        (tmp_path / "tiny.toml").write_text(to_toml(tiny_config(tmp_path / name)))
        return load_config(
            tmp_path / "tiny.toml",
            [f"--job.trainer={spec}", f"--job.callbacks={callbacks}", f"--training.steps={steps}"],
            cls=config_class(cls),
        )

    whole = trained(config("whole", 6), cls)
    assert len((whole.run_dir / "steps.csv").read_text().splitlines()) == 6
    assert (whole.run_dir / "evaluations.csv").exists() == (cls.evaluate is not Trainer.evaluate)
    broken = tiny_trainer(config("broken", 6), cls)
    broken.begin()
    for _ in range(3):
        broken.train_step()
    broken.finish()
    assert trained(config("broken", 6), cls).digest() == whole.digest()
