"""What launch must know of classes that aren't ours, asked of a short process.

A trainer's module imports torch; launch doesn't, and mustn't: it looks after processes for days, and starts at once.

    python -P -m outlast.launch.asking SOCKET_FD      answers {"trainer"} and {"check": config}
    python -P -m outlast.launch.asking --help MODULE:CLASS
"""

import dataclasses
import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any

from outlast.config import DEFAULT_TRAINER, Config
from outlast.config.own import config_from_dict, described, mirrored
from outlast.errors import ConfigError
from outlast.launch import messages

_COMMAND = (sys.executable, "-P", "-m", "outlast.launch.asking")


class Asked:
    """The trainer that `job.trainer` names; a process is started only for one that isn't the default.

    Args:
        spec: `module:Class`.

    Raises:
        ConfigError: it can't be used; says why.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.config_class: type[Config] = Config
        self.reads_corpus = True
        """It reads the corpus that `data.path` names."""
        self._sock: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        if spec != DEFAULT_TRAINER:
            facts = self._ask({"trainer": spec})
            self.reads_corpus = facts["reads_corpus"]
            self.config_class = mirrored(facts["config"])

    def check(self, config: Config) -> None:
        """Look at values as the classes themselves do.

        Raises:
            ConfigError: one of them refuses.
        """
        if self._sock is not None or config.job.callbacks:
            self._ask({"check": dataclasses.asdict(config)})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._sock is None:
            self._sock, theirs = messages.pair()
            with theirs:
                self._child = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__,  # whatever a module prints while it is imported
                    pass_fds=[theirs.fileno()],
                )
        try:
            messages.send(self._sock, question)
            answer, _ = messages.receive(self._sock)
        except OSError:
            answer = None
        if answer is None:
            assert self._child is not None
            what = f"job.trainer = {self.spec!r}" if "trainer" in question else "job.callbacks"
            raise ConfigError(f"{what}: importing it ends the process: exit {self._child.wait()}")
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        if self._sock is not None and self._child is not None:
            self._sock.close()
            self._child.kill()
            self._child.wait()
            self._sock = None

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def show_help(spec: str) -> int:
    """Print the help of `outlast launch` with a trainer's own sections. Returns the exit code."""
    return subprocess.run([*_COMMAND, "--help", spec], check=False).returncode


# The short process ---------------------------------------------------------------------------------


def _answer(question: dict[str, Any], known: dict[str, type[Config]]) -> dict[str, Any]:
    from outlast.callbacks import load_callbacks
    from outlast.classes import config_class, load_trainer, replaces
    from outlast.config import check_section

    try:
        if "trainer" in question:
            trainer = load_trainer(question["trainer"])
            known["config"] = config_class(trainer)
            return {"reads_corpus": not replaces(trainer, "open_data"), "config": described(known["config"])}
        config = config_from_dict(known.get("config", Config), question["check"])
        load_callbacks(config.job.callbacks)
        for section in dataclasses.fields(config):
            check_section(config, section.name)
    except ConfigError as e:
        return {"error": str(e)}
    return {}


def _main(args: list[str]) -> int:
    if args[0] == "--help":
        from outlast.classes import config_class, load_trainer
        from outlast.config import load_config
        from outlast.config.own import with_options
        from outlast.launch.options import LaunchConfig

        cls = with_options(LaunchConfig, config_class(load_trainer(args[1])))
        load_config(None, ["--help"], cls=cls, prog="outlast launch")
        return 0
    known: dict[str, type[Config]] = {}
    with socket.socket(fileno=int(args[0])) as sock:
        sock.set_inheritable(False)
        while (question := messages.receive(sock)[0]) is not None:
            messages.send(sock, _answer(question, known))
    return 0


if __name__ == "__main__":
    code = _main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # whatever threads a module has started
