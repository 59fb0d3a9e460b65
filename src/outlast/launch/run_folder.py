"""The folder of a run, as launch keeps it: who uses it, its config, and how to reach the launch that runs it.

    RUN/config.toml     the settings, without those that differ from group to group
    RUN/launch.lock     locked by the launch that uses the folder
    RUN/job.json        while a launch runs: token, lighthouse address, process id. Readable by its user only
    RUN/launch.sock     while a launch runs: what `outlast join` talks to
    RUN/logs/           what each process printed

Imports no torch.
"""

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from outlast import saves
from outlast.config import Config, asked_trainer, load_config, new_run_dir, to_toml, trajectory_fields, with_run_dir
from outlast.errors import ConfigError, StorageError


def make_run_dir(given: str, config_file: str | None) -> Path:
    """Make the folder of a run: the given one, or a new runs/NAME-TIME.

    Args:
        given: path; empty: a new one.
        config_file: gives a new one its name.

    Raises:
        ConfigError: it can't be made or written.
    """
    path = Path(given or new_run_dir(config_file))
    for number in range(2, 1000):
        if given or not path.exists():
            break
        path = Path(f"{new_run_dir(config_file)}-{number}")  # another one of this very second
    saves.make_run_dir(path)
    (path / "logs").mkdir(exist_ok=True)
    return path.absolute()


class RunFolder:
    """A run's folder, held by this launch alone until `close`.

    Args:
        path: an existing folder.

    Raises:
        ConfigError: another launch uses it.
        StorageError: it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = path / "launch.sock"
        self._job = path / "job.json"
        try:
            self._lock = os.open(path / "launch.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StorageError(f"run folder {path} can't be written: {e.strerror}; choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel, however we end
        except OSError:
            pid = os.read(self._lock, 20).decode(errors="replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"run folder {path} is in use by another launch (process {pid}): stop it, add groups to it with "
                f"`outlast join {path}`, or choose another --run-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def log(self, name: str) -> Path:
        """File for what a process prints."""
        return self.path / "logs" / f"{name}.log"

    def keep_config(self, config: Config) -> None:
        """Check that the run there, if any, is the same one, and write down its settings.

        Raises:
            ConfigError: it has another trajectory; names the field.
        """
        file = self.path / "config.toml"
        if file.exists():
            trainer = {"job.trainer": asked_trainer(file, ())}  # first: it decides what else there is
            same = trainer["job.trainer"] == config.job.trainer
            was = trajectory_fields(load_config(file, cls=type(config), check=False)) if same else trainer
            now = {name: value for name, value in trajectory_fields(config).items() if same or name in trainer}
            for name, value in now.items():
                if was[name] != value:
                    raise ConfigError(
                        f"run folder {self.path} holds a run with {name} = {was[name]!r}, this one has {value!r}; "
                        "use the same value to resume it, or another --run-dir"
                    )
        self._write(file, to_toml(with_run_dir(config, "")), 0o644)  # without its path, so that it can be moved

    def keep_job(self, **facts: Any) -> None:
        """Write down how to reach this launch."""
        self._write(self._job, json.dumps(facts) + "\n", 0o600)

    def _write(self, file: Path, text: str, mode: int) -> None:
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(fd, "w") as f:
                f.write(text)
            temporary.replace(file)
        except OSError as e:
            raise StorageError(f"{file} can't be written: {e.strerror}") from None

    def close(self) -> None:
        """Let go of the folder."""
        for file in (self._job, self.socket):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        os.close(self._lock)
