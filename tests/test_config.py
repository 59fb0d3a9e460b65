"""One parser for TOML and flags: what is written is read back, and what is wrong is refused in one line."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast import cli
from outlast.config import (
    MAX_UNITS,
    Checkpoint,
    Config,
    Data,
    FaultTolerance,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Training,
    check_config,
    host_and_port,
    lighthouse_address,
    load_config,
    new_run_dir,
    take_config_file,
    to_toml,
    trajectory_fields,
    with_run_dir,
)
from outlast.errors import ConfigError


def toml(folder: Path, text: str) -> Path:
    """A config file with this text."""
    file = folder / "run.toml"
    file.write_text(text)
    return file


def refused(args: Sequence[str], file: Path | None = None, cls: type[Config] = Config) -> str:
    """The one line that settings are refused with."""
    with pytest.raises(ConfigError) as e:
        load_config(file, args, cls)
    line = str(e.value)
    assert line and "\n" not in line
    return line


# --- Round trip ------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "a \"quoted\" 'one'",
        "two\nlines\r\n\ttab",
        "back\\slash\\n",
        "naïve ☃ 日本 \U0001f600",
        "--x=1",
        "#",
        "\x00\x7f\x85",
    ]
)
positive = st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False)
units = st.integers(1, 50)

configs = st.builds(
    Config,
    job=st.builds(Job, run_dir=texts),
    model=st.builds(Model, flavor=texts, dim=st.integers(0, 10**6), tie_embeddings=st.sampled_from(["yes", "no"])),
    data=st.builds(Data, path=texts, tokenizer=texts),
    training=st.builds(
        lambda count, **keys: Training(global_batch_size=count * keys["local_batch_size"], **keys),
        count=units,
        local_batch_size=units,
        seed=st.integers(0, 2**62),
        accumulation=st.sampled_from(["exact", "float"]),
        max_norm=st.just(0.0) | positive,
    ),
    optimizer=st.builds(Optimizer, lr=positive, beta1=st.floats(0, 1, exclude_max=True), eps=positive),
    lr_scheduler=st.builds(LRScheduler, min_lr_factor=st.floats(0, 1)),
    checkpoint=st.builds(Checkpoint, enable=st.booleans()),
    fault_tolerance=st.builds(
        FaultTolerance,
        lighthouse=texts,
        join_timeout_ms=st.none() | st.integers(1000, 10**9),
        group_size=units,
    ),
    metrics=st.builds(Metrics, enable_tensorboard=st.booleans()),
)


@given(configs)
@settings(max_examples=40, deadline=None)
def test_a_config_written_as_toml_is_read_back_equal(config: Config):
    with tempfile.TemporaryDirectory() as folder:
        assert load_config(toml(Path(folder), to_toml(config))) == config


@given(configs)
@settings(max_examples=25, deadline=None)
def test_a_config_given_as_flags_is_read_equal(config: Config):
    """The same names and types on the command line, `--x=v` and `--x v`."""
    args: list[str] = []
    for section in dataclasses.fields(config):
        for key, value in dataclasses.asdict(getattr(config, section.name)).items():
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            if len(args) % 2 or isinstance(value, bool) or text.startswith("--"):
                args.append(f"--{section.name}.{key}={text}")
            else:
                args += [f"--{section.name}.{key}", text]
    assert load_config(None, args) == config


def test_the_defaults_are_a_config_that_runs():
    assert load_config(None) == Config()
    check_config(Config())
    assert load_config(None, ["--fault_tolerance.enable"]).fault_tolerance.enable


def test_the_shipped_configs_are_read():
    files = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
    assert files
    for file in files:
        load_config(file)


def test_flags_win_over_the_file(tmp_path: Path):
    file = toml(tmp_path, '[training]\nsteps = 7\nseed = 3\n[checkpoint]\nenable = false\n[model]\nflavor = "demo"\n')
    read = load_config(file, ["--training.steps=9", "--checkpoint.enable", "--model.flavor", "8B"])
    assert (read.training.steps, read.training.seed, read.checkpoint.enable, read.model.flavor) == (9, 3, True, "8B")
    assert not load_config(file).checkpoint.enable


def test_the_last_of_two_equal_flags_wins():
    assert load_config(None, ["--training.steps=9", "--training.steps=11"]).training.steps == 11


@pytest.mark.parametrize(
    ("args", "on"),
    [
        (["--checkpoint.enable"], True),
        (["--checkpoint.enable=true"], True),
        (["--checkpoint.enable=True"], True),
        (["--checkpoint.enable", "true"], True),
        (["--checkpoint.enable=false"], False),
        (["--checkpoint.enable", "FALSE"], False),
        (["--checkpoint.no-enable"], False),
        (["--checkpoint.no_enable"], False),
        (["--checkpoint.no-enable=false"], True),
        (["--checkpoint.enable", "--training.steps=3"], True),
    ],
)
def test_booleans_in_every_spelling(args: list[str], on: bool):
    for before in ([], ["--checkpoint.enable=false"], ["--checkpoint.enable"]):
        assert load_config(None, [*before, *args]).checkpoint.enable is on


def test_dashes_and_underscores_are_the_same():
    assert load_config(None, ["--training.local-batch-size=2"]).training.local_batch_size == 2


@dataclass(frozen=True)
class Own(Config):
    """A config with more in it, as launch has."""

    groups: int = 3
    """Of the command."""
    model2: Model = field(default_factory=Model)
    """A section of one's own."""


def test_a_subclass_adds_options_and_sections(tmp_path: Path):
    read = load_config(toml(tmp_path, "groups = 4\n[model2]\ndim = 8\n"), ["--training.steps=2"], Own)
    assert (read.groups, read.model2.dim, read.training.steps) == (4, 8, 2)
    assert "did you mean groups" in refused([], toml(tmp_path, "group = 4\n"), Own)


# --- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training\nsteps = 3", "not valid TOML"),
        ("[training]\nsteps = ", "not valid TOML"),
        ("[training]\nstep = 3", "training.step; did you mean training.steps?"),
        ("[training]\nlr = 3.0", "training.lr; did you mean optimizer.lr?"),
        ("steps = 3", "steps; did you mean training.steps?"),
        ("xyzzy = 3", "xyzzy; `outlast train --help` lists all"),
        ("[trainig]\nsteps = 3", "[trainig]; did you mean training?"),
        ("[qqq]\nsteps = 3", "unknown section [qqq]"),
        ("training = 3", "should be a table, [training]"),
        ('[training]\nsteps = "3"', "training.steps = '3'"),
        ("[training]\nsteps = 3.0", "expected int"),
        ("[training]\nsteps = true", "expected int"),
        ("[training]\nsteps = {a = 1}", "expected int"),
        ("[training]\nsteps = [3]", "expected int"),
        ("[training]\nsteps = 1979-05-27", "expected int"),
        ('[optimizer]\nlr = "1e-3"', "expected float"),
        ("[checkpoint]\nenable = 1", "expected bool"),
        ('[checkpoint]\nenable = "true"', "expected bool"),
        ('[training]\naccumulation = "int"', "one of 'exact', 'float'"),
        ("[job]\nrun_dir = 3", "expected str"),
        ('[fault_tolerance]\njoin_timeout_ms = "x"', "expected int"),
        ("[training]\nsteps = 0", "training.steps = 0: expected more than 0"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, says: str):
    assert says in refused([], toml(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    assert "No such file" in refused([], tmp_path / "absent.toml")
    assert str(tmp_path) in refused([], tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[job]\nrun_dir = "\xe9"\n')
    assert "UTF-8" in refused([], tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--training.step=3"], "--training.step; did you mean --training.steps?"),
        (["--trainin.steps=3"], "did you mean --training.steps?"),
        (["--steps=3"], "did you mean --training.steps?"),
        (["--qqq"], "unknown setting --qqq"),
        (["--"], "unknown setting"),
        (["--training.steps"], "--training.steps: a value is missing"),
        (["--training.steps", "--training.seed=1"], "--training.steps: a value is missing"),
        (["--training.steps=x"], "training.steps"),
        (["--training.steps="], "training.steps"),
        (["--training.steps=3.0"], "training.steps"),
        (["--optimizer.lr=fast"], "optimizer.lr"),
        (["--training.accumulation=int"], "accumulation"),
        (["--checkpoint.enable=1"], "expected true or false"),
        (["--checkpoint.enable=yes"], "expected true or false"),
        (["steps=3"], "unexpected argument 'steps=3'"),
        (["--training.steps=3", "4"], "unexpected argument '4'"),
        (["--checkpoint.enable", "maybe"], "maybe"),
        (["--training.global_batch_size=25"], "nearest: 24"),
        (["--training.global_batch_size=2"], "nearest: 4"),
        ([f"--training.global_batch_size={4 * MAX_UNITS + 4}"], "work units a step"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(args: list[str], says: str):
    assert says in refused(args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["group_size=7"], "6 work units a step for fault_tolerance.group_size = 7"),
        (["group_size=2", "min_replica_size=3"], "min_replica_size = 3 is more than group_size = 2"),
        (["heartbeat_timeout_ms=50"], "expected at least 100"),
        (["process_group_timeout_ms=600"], "process_group_timeout_ms = 600 contradicts heartbeat_timeout_ms = 500"),
        (["join_timeout_ms=999"], "expected at least twice that, 1000"),
        (["heartbeat_timeout_ms=5000", "join_timeout_ms=6000"], "contradicts"),
        (["group_size=0"], "group_size = 0"),
        (["min_replica_size=0"], "min_replica_size = 0"),
        (["replica_id=-1"], "replica_id = -1"),
    ],
)
def test_groups_that_could_never_commit_are_refused(args: list[str], says: str):
    assert says in refused(["--fault_tolerance.enable", *(f"--fault_tolerance.{arg}" for arg in args)])


NUMBERS = {key for key, value in trajectory_fields(Config()).items() if type(value) in (int, float)} | {
    "training.threads",
    "training.unit_pause_ms",
    "checkpoint.interval",
    "checkpoint.keep_latest_k",
    "fault_tolerance.replica_id",
    "fault_tolerance.group_size",
    "fault_tolerance.min_replica_size",
    "fault_tolerance.heartbeat_timeout_ms",
    "fault_tolerance.join_timeout_ms",
    "fault_tolerance.process_group_timeout_ms",
    "metrics.log_freq",
    "metrics.digest_every",
    "metrics.evaluate_every",
}
SIZES = {key for key in NUMBERS if key.startswith("model.")}  # looked at with the flavour, when the model is built


def leaf(config: Config, key: str) -> Any:
    """The value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def changed(key: str, value: Any) -> Config:
    """The default config of a group with one setting changed, unchecked."""
    section, _, name = key.partition(".")
    config = dataclasses.replace(Config(), fault_tolerance=FaultTolerance(enable=True))
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


@pytest.mark.parametrize("key", sorted(NUMBERS - SIZES))
def test_no_number_may_be_negative_or_nan(key: str):
    for value in (-1, -1.0, float("nan")) if type(leaf(Config(), key)) is float else (-1,):
        with pytest.raises(ConfigError, match=re.escape(key.rpartition(".")[2])):
            check_config(changed(key, value))


def test_every_number_is_in_that_test():
    """A new field must be looked at here."""
    hints = {
        f"{s.name}.{f.name}": f.type
        for s in dataclasses.fields(Config)
        for f in dataclasses.fields(type(getattr(Config(), s.name)))
    }
    numbers = {key for key, kind in hints.items() if kind in (int, float, int | None)}
    assert numbers - {"parallelism.data_parallel_shard_degree"} == NUMBERS  # -1 there: as many as there are


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.beta1", 1.0), ("optimizer.beta2", 1.5), ("lr_scheduler.min_lr_factor", 1.1)],
)
def test_a_share_is_a_share(key: str, value: float):
    with pytest.raises(ConfigError, match=re.escape(f"{key} = {value}")):
        check_config(changed(key, value))


def test_timeouts_contradict_nothing_where_no_group_is():
    """The plain trainer doesn't care."""
    load_config(None, ["--fault_tolerance.join_timeout_ms=1", "--fault_tolerance.group_size=100"])


# --- The rest --------------------------------------------------------------------------------------


def test_work_units_are_the_batch_over_what_a_group_takes_at_a_time():
    """Case C7: the batch is fixed, and so is its division; how many groups there are isn't in it."""
    c = load_config(None, ["--training.global_batch_size=16", "--training.local_batch_size=2"])
    assert (c.units(), c.units(ranks=2)) == (8, 4)


def test_what_decides_the_weights_is_marked():
    """And nothing else: where a run is written and how fast it goes may differ between its groups."""
    fields = trajectory_fields(Config())
    rest = {"training.threads", "training.unit_pause_ms", "training.device"}
    never = (
        "job.run_dir",
        "job.callbacks",
        "data.",
        "checkpoint.",
        "fault_tolerance.",
        "metrics.",
        "parallelism.",
        *rest,
    )
    assert not [key for key in fields if key.startswith(never)]
    for section in ("model", "training", "optimizer", "lr_scheduler", "activation_checkpoint", "compile"):
        keys = {f"{section}.{f.name}" for f in dataclasses.fields(getattr(Config(), section))}
        assert keys - rest <= fields.keys()


def test_addresses():
    assert host_and_port("http://10.0.0.1:29510") == ("10.0.0.1", 29510)
    assert host_and_port("http://[::1]:80") == ("::1", 80)
    for wrong in ("", "localhost:29510", "https://h:1", "http://h", "http://:1", "http://h:x", "http://h:99999"):
        with pytest.raises(ConfigError, match="expected http://host:port"):
            host_and_port(wrong)


def test_the_lighthouse_is_the_configs_then_the_environments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://env:1")
    assert lighthouse_address(FaultTolerance(lighthouse="http://config:2")) == "http://config:2"
    assert lighthouse_address(FaultTolerance()) == "http://env:1"
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE")
    assert lighthouse_address(FaultTolerance()).startswith("http://localhost:")


def test_the_file_is_taken_out_of_the_arguments():
    assert take_config_file(["--a=1", "--config", "f.toml", "--b=2"]) == ("f.toml", ["--a=1", "--b=2"])
    assert take_config_file(["--config=g.toml"]) == ("g.toml", [])
    assert take_config_file(["--a=1"]) == (None, ["--a=1"])
    with pytest.raises(ConfigError, match="--config"):
        take_config_file(["--config"])


def test_a_run_without_a_folder_gets_one_of_its_files_name():
    assert re.fullmatch(r"runs/llama-\d{8}-\d{6}", new_run_dir("configs/llama.toml"))
    assert with_run_dir(Config(), "there").job.run_dir == "there"


# --- The command -----------------------------------------------------------------------------------


def outlast(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    command = [sys.executable, "-m", "outlast.cli", *args]
    env = {**os.environ, "OUTLAST_CACHE": str(cwd), "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=False)


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["train", "--training.step=3"],
        ["train", "--config", "absent.toml"],
        ["train", "--training.steps=x"],
    ],
    ids=" ".join,
)
def test_the_command_refuses_in_one_line_on_stderr(args: list[str], tmp_path: Path):
    done = outlast(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"outlast: [^\n]+\n", done.stderr)
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())  # no run folder of a run that can't be


def test_sizes_that_fit_no_model_are_refused_in_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
):
    """Looked at by the model, after torch was imported: the same manners."""
    for setting, says in [("flavor=9B", "did you mean 8B?"), ("dim=33", "model.dim = 33")]:
        assert cli.main(["train", f"--job.run_dir={tmp_path}", f"--data.path={corpus}", f"--model.{setting}"]) == 2
        line = capsys.readouterr().err
        assert re.fullmatch(r"outlast: [^\n]+\n", line) and says in line


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_run_folder_that_cannot_be_made_is_refused(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert cli.main(["train", f"--job.run_dir={tmp_path / place}"]) == 2
    assert re.fullmatch(r"outlast: [^\n]+\n", capsys.readouterr().err)


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(said.count(f"\n  {name} ") == 2 for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0


def test_help_shows_every_field_with_its_meaning(tmp_path: Path):
    """A field's docstring is its documentation; one without is a mistake."""
    done = outlast("train", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stdout).split())
    source = (Path(cli.__file__).parent / "config/sections.py").read_text()
    for section in dataclasses.fields(Config):
        for f in dataclasses.fields(type(getattr(Config(), section.name))):
            assert f"--{section.name}.{f.name}" in shown, f.name
            found = re.search(rf'\n    {f.name}: [^\n]*\n    """(.*?)"""', source, re.DOTALL)
            assert found, f"{f.name} has no docstring"
            assert " ".join(found[1].split()) in shown, f.name


QUICK = ["cli", "config", "errors", "events", "saves", "audit", "launch", "demo", "times", "curves"]


def test_what_starts_processes_and_reads_runs_imports_no_torch():
    """Help, errors and the launcher come at once; importing torch takes seconds and 290 MB."""
    code = f"""
import importlib, json, pkgutil, sys
for name in {QUICK}:
    module = importlib.import_module("outlast." + name)
    for sub in pkgutil.iter_modules(getattr(module, "__path__", [])):
        importlib.import_module(f"outlast.{{name}}.{{sub.name}}")
print(json.dumps(sorted(sys.modules)))
"""
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert {"outlast.launch.supervisor", "outlast.audit.run"} <= set(loaded)
    heavy = {name.partition(".")[0] for name in loaded}
    assert not heavy & {"torch", "torchft", "grain", "jax", "tensorboard", "safetensors"}
