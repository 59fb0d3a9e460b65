"""The folder of saved weights, without torch: which saves are whole, and whether the run is done.

A save is `RUN/checkpoints/step-00000050/` with a `manifest.json` that names each file with its size and
SHA-256. It is written under a temporary name, synced, and renamed: it is whole or it isn't there.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError

FORMAT = 1


def saves_dir(run_dir: str | Path) -> Path:
    """Where the saves of a run are."""
    return Path(run_dir) / "checkpoints"


def save_path(run_dir: str | Path, step: int) -> Path:
    """Folder of the save of a step."""
    return saves_dir(run_dir) / f"step-{step:08d}"


def steps_saved(run_dir: str | Path) -> list[int]:
    """Steps with a save, newest first, verified or not."""
    found = [p.name[5:] for p in saves_dir(run_dir).glob("step-*") if p.is_dir()]
    return sorted((int(name) for name in found if name.isdigit()), reverse=True)


def problem(run_dir: str | Path, step: int) -> str | None:
    """Why a save isn't whole, naming the file, or None if every byte is as it was written."""
    folder = save_path(run_dir, step)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT or manifest["step"] != step:
            return f"{folder / 'manifest.json'}: format {manifest['format']}, step {manifest['step']}"
        for name, expected in manifest["files"].items():
            path = folder / Path(name).name
            if path.stat().st_size != expected["bytes"] or file_sha256(path) != expected["sha256"]:
                return f"{path} isn't what was saved (size or SHA-256 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{folder}: {type(e).__name__}: {e}"
    return None


def newest_step(run_dir: str | Path) -> int | None:
    """The newest step whose save is whole, or None."""
    return next((s for s in steps_saved(run_dir) if problem(run_dir, s) is None), None)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def make_run_dir(run_dir: str | Path) -> None:
    """Make the folder of a run, and see that something can be written there, before anything starts.

    Raises:
        ConfigError: it can't be made, or not written: no such place, no right, no space.
    """
    probe = Path(run_dir) / f".probe.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(_ROOM))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(f"run folder {run_dir} can't be written: {e.strerror}; free or choose another") from None


_ROOM = 1 << 20  # bytes that must be free at the start: the first events


def file_facts(path: Path) -> dict[str, Any]:
    """A file's entry in a manifest."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """An empty folder beside `final`, to be given its name by `make_final`; else it is removed."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # an earlier life had this process id: in a container all do
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_final(temporary: Path, final: Path) -> None:
    """Sync a folder and rename it: it is there whole, or not at all."""
    for path in temporary.iterdir():
        sync(path)
    sync(temporary)
    if final.exists():  # a save that isn't whole, or the same one
        shutil.rmtree(final)
    temporary.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Have what was written survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prune(run_dir: str | Path, keep: int, newest: int) -> None:
    """Remove all but `keep` saves up to the one just written, and what writers that died left behind.

    Later ones are left alone: they belong to a damaged generation that was passed over. `keep` 0: all.
    """
    for step in [s for s in steps_saved(run_dir) if s <= newest][keep:] if keep else ():
        shutil.rmtree(save_path(run_dir, step), ignore_errors=True)
    for left in saves_dir(run_dir).glob(".step-*.*"):
        pid = left.name.rsplit(".", 1)[-1]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            shutil.rmtree(left, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    sync(temporary)
    temporary.rename(path)


def mark_done(run_dir: str | Path, **facts: Any) -> None:
    """Say that the run has made its last step: who starts later has nothing to do."""
    write_whole(Path(run_dir) / "done.json", json.dumps(facts) + "\n")


def done_marker(run_dir: str | Path) -> dict[str, Any] | None:
    """What `mark_done` wrote, or None while the run isn't done."""
    try:
        return json.loads((Path(run_dir) / "done.json").read_text())
    except (OSError, ValueError):
        return None
