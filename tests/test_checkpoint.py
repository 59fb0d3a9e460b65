"""Saved weights: what comes back is what was there, bit for bit, or it isn't taken at all."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import digests_of, events_of, tiny_config, tiny_trainer, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outlast import checkpoint, saves
from outlast.config import Config, to_toml
from outlast.errors import DataError, StorageError, UserError
from outlast.events import EventTail
from outlast.rank import run_rank

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def a_state(seed: int) -> dict[str, Tensor]:
    """A small state of the usual names."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model.a.weight": torch.randn(3, 5, generator=g),
        "model.b": torch.randn(7, generator=g).bfloat16(),
        "optimizer.a.weight.exp_avg": torch.randn(3, 5, generator=g),
        "optimizer.a.weight.step": torch.tensor(float(seed)),
    }


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1 << bit
    file.write_bytes(data)


def stop_after(config: Config, step: int) -> str:
    """Train until a step is committed, asked to stop in the middle of it; the digest then."""
    trainer = tiny_trainer(config)
    trainer.begin()
    while trainer.more():
        trainer.stopping = trainer.step + 1 == step
        trainer.train_step()
    trainer.finish()
    assert trainer.step == step
    return checkpoint.digest(trainer.state())


# --- A state ---------------------------------------------------------------------------------------


def test_a_save_has_the_bits_of_the_state(tmp_path: Path):
    state = a_state(1)
    size = checkpoint.save(tmp_path, 4, state, {"fact": 1}, keep=0)
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert (saved.step, saved.meta) == (4, {"fact": 1})
    assert checkpoint.digest(saved.tensors()) == checkpoint.digest(state)
    assert saved.tensors(model_only=True).keys() == {"model.a.weight", "model.b"}
    assert size == sum((saved.path / name).stat().st_size for name in FILES[:3])


@given(st.sampled_from(sorted(a_state(1))), st.integers(0, 14), st.sampled_from(["bit", "name", "dtype", "shape"]))
@settings(max_examples=30, deadline=None)
def test_a_digest_tells_apart_what_differs_in_anything(name: str, at: int, what: str):
    state = a_state(1)
    other = {k: v.clone() for k, v in state.items()}
    assert checkpoint.digest(other) == checkpoint.digest(dict(reversed(other.items()))) == checkpoint.digest(state)
    t = other[name]
    match what:
        case "bit":
            checkpoint.tensor_bytes(t)[at % (t.numel() * t.element_size())] ^= 1
        case "name":
            other[f"{name}x"] = other.pop(name)
        case "dtype":
            other[name] = t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)
        case _:
            other[name] = t.unsqueeze(0)
    assert checkpoint.digest(other) != checkpoint.digest(state)


def test_slices_take_turns_until_every_bit_was_looked_at():
    """Two groups whose bits differ anywhere are told apart within as many steps as the state has MiB."""
    state = {"model.a": torch.zeros(300_000), "model.b": torch.zeros(7), "optimizer.c": torch.zeros(500_000)}
    slices = 4
    whole = [checkpoint.slice_digest(state, step) for step in range(slices)]
    assert [checkpoint.slice_digest(state, step + 3 * slices) for step in range(slices)] == whole
    for name, at in [
        ("model.a", 0),
        ("model.a", 299_999),
        ("model.b", 3),
        ("optimizer.c", 0),
        ("optimizer.c", 499_999),
    ]:
        state[name][at] = 1e-30
        found = [checkpoint.slice_digest(state, step) for step in range(slices)]
        assert sum(a != b for a, b in zip(found, whole, strict=True)) == 1
        state[name][at] = 0


@pytest.mark.parametrize("wrong", ["missing", "more", "shape", "dtype"])
def test_a_state_is_installed_whole_or_not_at_all(wrong: str):
    into, source = a_state(1), a_state(2)
    before = checkpoint.digest(into)
    last = max(source)
    match wrong:
        case "missing":
            del source[last]
        case "more":
            source["model.z"] = torch.zeros(1)
        case "shape":
            source[last] = source[last].reshape(1, -1)
        case _:
            source[last] = source[last].double()
    with pytest.raises(DataError, match="model.z" if wrong == "more" else last):
        checkpoint.install(into, source, "a save")
    assert checkpoint.digest(into) == before


def test_a_tied_weight_is_saved_once(tmp_path: Path):
    trainer = tiny_trainer(tiny_config(tmp_path, model={"tie_embeddings": "yes"}))
    names = set(trainer.state())
    assert "model.tok_embeddings.weight" in names
    assert not any("output.weight" in name for name in names)
    assert {k.split(".", 1)[0] for k in names} == {"model", "optimizer"}
    assert len([k for k in names if k.endswith("exp_avg")]) == len(trainer.params)


# --- Stop and resume -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digests of the undisturbed tiny run."""
    config = tiny_config(tmp_path_factory.mktemp("straight"))
    trained(config)
    return digests_of(config)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_run_stopped_and_resumed_is_the_undisturbed_run(tmp_path: Path, straight: dict[int, str], step: int):
    config = tiny_config(tmp_path)
    assert stop_after(config, step) == straight[step]
    assert saves.problem(tmp_path, step) is None
    assert saves.done_marker(tmp_path) is None
    again = tiny_trainer(config)
    again.begin()
    assert (again.step, checkpoint.digest(again.state())) == (step, straight[step])
    while again.more():
        again.train_step()
    again.finish()
    assert digests_of(config) == straight
    done = saves.done_marker(tmp_path)
    assert done is not None and (done["step"], done["digest"]) == (6, straight[6])
    rates = {e["step"]: e["lr"] for e in events_of(config, "commit")}
    assert [rates[s] for s in (1, 2)] == [1.5e-3, 3e-3]  # a schedule has no state that could start again (C3)
    assert rates[6] == pytest.approx(3e-4)


def test_skipped_updates_in_a_row_survive_a_resume(tmp_path: Path):
    config = tiny_config(tmp_path, training={"max_skipped_steps": 3})
    trainer = tiny_trainer(config)
    trainer.skipped_in_a_row, trainer.step = 2, 2
    trainer.save()
    again = tiny_trainer(config)
    again.begin()
    assert (again.step, again.skipped_in_a_row) == (2, 2)


def wait_for_commit(config: Config, step: int) -> None:
    """Until a run has committed a step."""
    tail, until = EventTail(config.job.run_dir), time.monotonic() + 60
    while not any(e["kind"] == "commit" and e["step"] >= step for e in tail.read()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_killed_run_resumed_is_the_undisturbed_run(tmp_path: Path, straight: dict[int, str]):
    """SIGKILL between any two instructions; what was committed after the newest save is made again, equal."""
    slow = tiny_config(tmp_path, training={"unit_pause_ms": 10.0})
    for step in (1, 3, 4):
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(run_rank(slow, f"life{step}"))
        wait_for_commit(slow, step)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    config = tiny_config(tmp_path)  # the pause doesn't decide the weights
    trained(config)
    assert digests_of(config) == straight
    assert len(events_of(config, "start")) == 4


def test_the_command_finishes_its_step_when_asked_to_stop(tmp_path: Path, straight: dict[int, str]):
    config = tiny_config(tmp_path / "run", checkpoint={"interval": 100}, training={"unit_pause_ms": 40.0})
    (tmp_path / "in.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "outlast.cli", "train", "--config", "in.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_commit(config, 2)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "")
    assert "stopping after this step" in out
    (end,) = events_of(config, "exit")
    step = saves.newest_step(config.job.run_dir)
    assert (end["code"], end["step"]) == (143, step)
    assert step in (2, 3, 4, 5)
    trained(tiny_config(tmp_path / "run"))
    assert digests_of(config) == straight


def test_a_resume_as_another_run_is_refused_by_name(tmp_path: Path):
    stop_after(tiny_config(tmp_path), 2)
    for section, changes, says in [
        ("training", {"seed": 1}, "training.seed = 0, this run has 1"),
        ("optimizer", {"lr": 0.5}, "optimizer.lr = 0.003, this run has 0.5"),
        ("model", {"dim": 64}, "model.dim = 32, this run has 64"),
    ]:
        with pytest.raises(UserError, match=says) as e:
            trained(tiny_config(tmp_path, **{section: changes}))
        assert e.value.exit_code == 2
        assert "\n" not in str(e.value)
    assert saves.newest_step(tmp_path) == 2


@pytest.fixture
def handlers() -> Iterator[None]:
    """`run_rank` sets signal handlers; put the old ones back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("enable", [True, False])
def test_who_starts_after_the_end_has_nothing_to_do(tmp_path: Path, enable: bool):
    config = tiny_config(tmp_path, checkpoint={"enable": enable})
    assert run_rank(config, "first") == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert run_rank(config, "late") == 0
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and "late" not in p.name}
    assert after == before
    assert [e["reason"] for e in events_of(config, "exit")][1].endswith("is finished (step 6): nothing to do")
    assert run_rank(tiny_config(tmp_path, checkpoint={"enable": enable}, training={"seed": 7}), "other") == 2
    assert (saves.newest_step(tmp_path) == 6) is enable


@pytest.mark.usefixtures("handlers")
def test_a_refusal_is_one_line_and_an_exit_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tiny_config(tmp_path)
    stop_after(config, 2)
    assert run_rank(tiny_config(tmp_path, training={"seed": 1}), "other") == 2
    err = capsys.readouterr().err
    assert err.startswith("outlast: ") and err.count("\n") == 1
    assert [(e["code"], e["life"]) for e in events_of(config, "exit")] == [(2, "other")]


# --- Damage (case C8) ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_save_is_passed_over_and_named(tmp_path: Path, straight: dict[int, str], name: str):
    config = tiny_config(tmp_path)
    stop_after(config, 4)
    file = saves.save_path(tmp_path, 4) / name
    flip(file, file.stat().st_size // 2, 3)
    trained(config)
    (passed,) = [e for e in events_of(config, "checkpoint") if e["action"] == "skip"]
    assert passed["step"] == 4 and (name in passed["why"] or str(file.parent) in passed["why"])
    assert [e["step"] for e in events_of(config, "checkpoint") if e["action"] == "load"] == [2]
    assert digests_of(config) == straight
    assert saves.problem(tmp_path, 4) is None  # made again


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two whole saves."""
    folder = tmp_path_factory.mktemp("two")
    for step in (2, 4):
        checkpoint.save(folder, step, a_state(step), {"step": step}, keep=0)
    return folder


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_is_found(two_saves: Path, name: str, at: int, bit: int):
    file = saves.save_path(two_saves, 4) / name
    whole = file.read_bytes()
    try:
        flip(file, at, bit)
        assert saves.problem(two_saves, 4)
        assert saves.newest_step(two_saves) == 2
    finally:
        file.write_bytes(whole)
    assert saves.newest_step(two_saves) == 4


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_found(two_saves: Path, name: str):
    file = saves.save_path(two_saves, 4) / name
    whole = file.read_bytes()
    for damage in (lambda: file.unlink(), lambda: file.write_bytes(whole[:-2]), lambda: file.write_bytes(b"")):
        damage()
        assert saves.newest_step(two_saves) == 2
        file.write_bytes(whole)
    assert saves.newest_step(two_saves) == 4


def test_names_that_are_no_saves_are_left_alone(tmp_path: Path):
    checkpoint.save(tmp_path, 2, a_state(2), {}, keep=1)
    for name in ("step-x", "step-", "notes", ".step-00000009"):
        (saves.saves_dir(tmp_path) / name).mkdir()
    (saves.saves_dir(tmp_path) / "step-00000010").write_text("a file")
    assert saves.steps_saved(tmp_path) == [2]
    checkpoint.save(tmp_path, 4, a_state(4), {}, keep=1)
    assert saves.steps_saved(tmp_path) == [4]
    assert (saves.saves_dir(tmp_path) / "notes").exists()


def test_a_save_under_another_steps_name_is_not_taken(tmp_path: Path):
    checkpoint.save(tmp_path, 2, a_state(2), {}, keep=0)
    saves.save_path(tmp_path, 2).rename(saves.save_path(tmp_path, 9))
    assert saves.newest_step(tmp_path) is None


# --- Writers that die ------------------------------------------------------------------------------


def save_and_die(folder: Path, step: int, at_line: int) -> int:
    """Fork; the child saves and kills itself before the given executed line of the saving code. Its process id."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return pid
    left = at_line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (saves.__file__, checkpoint.__file__):
            return None
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        sys.settrace(trace)
        checkpoint.save(folder, step, a_state(step), {"step": step}, keep=1)
    finally:
        os._exit(0)


def test_a_writer_killed_at_any_line_leaves_a_whole_save(tmp_path: Path):
    """The old one until the new one is whole, and no rubbish for good."""
    taken: set[int] = set()
    for i, at_line in enumerate([*range(1, 130, 6), 10**6]):
        folder = tmp_path / str(i)
        checkpoint.save(folder, 2, a_state(2), {"step": 2}, keep=1)
        save_and_die(folder, 4, at_line)
        newest = checkpoint.newest(folder)
        assert newest is not None
        assert checkpoint.digest(newest.tensors()) == checkpoint.digest(a_state(newest.step))
        taken.add(newest.step)
        assert saves.steps_saved(folder)[0] == newest.step  # no half save has a save's name
        checkpoint.save(folder, 6, a_state(6), {"step": 6}, keep=1)
        assert [p.name for p in saves.saves_dir(folder).iterdir()] == ["step-00000006"]
    assert taken == {2, 4}


def test_a_writer_with_a_dead_writers_process_id_can_save(tmp_path: Path):
    """In a container every life has the same one."""
    left = saves.saves_dir(tmp_path) / f".step-00000004.{os.getpid()}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left / "rubbish").write_bytes(b"half")
    checkpoint.save(tmp_path, 4, a_state(4), {}, keep=1)
    assert saves.newest_step(tmp_path) == 4
    assert sorted(p.name for p in saves.save_path(tmp_path, 4).iterdir()) == sorted(FILES)
    assert not left.exists()


def test_a_living_writers_folder_is_left_alone(tmp_path: Path):
    other = saves.saves_dir(tmp_path) / f".step-00000004.{os.getppid()}"
    other.mkdir(parents=True)
    checkpoint.save(tmp_path, 2, a_state(2), {}, keep=1)
    assert other.exists()
    assert saves.newest_step(tmp_path) == 2


# --- Which are kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [6, 5]), (0, [6, 5, 4, 3, 2, 1])])
def test_the_newest_saves_are_kept(tmp_path: Path, keep: int, left: list[int]):
    trained(tiny_config(tmp_path, checkpoint={"interval": 1, "keep_latest_k": keep}))
    assert saves.steps_saved(tmp_path) == left
    assert all(saves.problem(tmp_path, step) is None for step in left)


def test_a_damaged_save_takes_no_whole_ones_place(tmp_path: Path):
    """The save that was just written must stay, though a broken one has a higher step."""
    checkpoint.save(tmp_path, 30, a_state(1), {}, keep=1)
    flip(saves.save_path(tmp_path, 30) / "model.safetensors", 100)
    checkpoint.save(tmp_path, 10, a_state(2), {}, keep=1)
    assert saves.newest_step(tmp_path) == 10
    checkpoint.save(tmp_path, 20, a_state(3), {}, keep=1)
    assert saves.newest_step(tmp_path) == 20


def test_without_saves_nothing_is_saved(tmp_path: Path):
    trained(tiny_config(tmp_path, checkpoint={"enable": False}))
    assert not saves.saves_dir(tmp_path).exists()


# --- A disk that refuses ---------------------------------------------------------------------------


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """This process can't write there, also if it is root."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@contextlib.contextmanager
def nearly_full() -> Iterator[None]:
    """No file of this process can grow beyond 64 KiB: the first write past that fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("trouble", ["read-only", "full"])
def test_a_disk_that_refuses_is_one_line_and_loses_nothing(tmp_path: Path, straight: dict[int, str], trouble: str):
    config = tiny_config(tmp_path)
    trainer = tiny_trainer(config)
    trainer.begin()
    for _ in range(3):
        trainer.train_step()
    with read_only(saves.saves_dir(tmp_path)) if trouble == "read-only" else nearly_full():
        with pytest.raises(StorageError) as e:
            trainer.train_step()
    assert "\n" not in str(e.value) and str(saves.save_path(tmp_path, 4)) in str(e.value)
    assert e.value.exit_code == 1  # a launcher tries again
    assert [p.name for p in saves.saves_dir(tmp_path).iterdir()] == ["step-00000002"]
    assert saves.newest_step(tmp_path) == 2
    trained(config)
    assert digests_of(config) == straight


def test_a_passed_over_save_is_said_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tiny_config(tmp_path)
    stop_after(config, 4)
    file = saves.save_path(tmp_path, 4) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    tiny_trainer(config).begin()
    said = capsys.readouterr().out
    assert "the save of step 4 isn't whole" in said and "format 99" in said and str(file) in said
    assert "resumed from step 2" in said
