"""What launch must know of a trainer that isn't the default one, asked of a short process.

A trainer's module imports torch; launch doesn't, and mustn't: it looks after processes for days, and starts at once.

    python -P -m outlast.launch.asking MODULE:CLASS ANSWER_FD

Imports no torch in launch itself.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from outlast.errors import ConfigError


@dataclass(frozen=True)
class TrainerFacts:
    """Of a trainer's class.

    Attributes:
        reads_corpus: it reads the corpus that `data.path` names.
    """

    reads_corpus: bool = True


def ask(spec: str) -> TrainerFacts:
    """Facts of the class that `job.trainer` names.

    Raises:
        ConfigError: it can't be used; says why.
    """
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as answers:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "outlast.launch.asking", spec, str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # whatever a module prints while it is imported
                pass_fds=[write_end],
            )
        finally:
            os.close(write_end)
        text = answers.read()
        code = child.wait()
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        raise ConfigError(f"job.trainer = {spec!r}: its module can't be imported: exit code {code}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return TrainerFacts(**answer)


def _answer(spec: str) -> dict[str, Any]:
    from outlast.classes import load_trainer, replaces

    try:
        return {"reads_corpus": not replaces(load_trainer(spec), "open_data")}
    except ConfigError as e:
        return {"error": str(e)}


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as out:
        json.dump(_answer(sys.argv[1]), out)
