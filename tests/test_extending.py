"""What a user adds: a trainer, a config section, callbacks, an evaluation. None of it knows of fault tolerance."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import saves
from outlast.audit import audit
from outlast.events import read_events

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
@pytest.mark.parametrize("command", ["train"])
def test_a_trainer_that_cannot_be_used_is_refused_in_one_line(folder: Path, command: str, spec: str, why: str) -> None:
    said = outlast(command, "--trainer", spec, cwd=folder)
    assert said.returncode == 2
    assert why in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
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
