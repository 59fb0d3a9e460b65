"""Errors that a user can cause, and the exit codes that every command keeps to.

Imports nothing but the standard library.
"""

import json
import os
import sys
import time

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""Bad input: a config, a corpus, an address or a peer that can't be right. Trying again won't help."""
EXIT_STOPPED = 143
"""SIGTERM or Ctrl-C: the step in hand was finished and nothing is lost."""


class UserError(Exception):
    """Something a user can put right. The message says what was found, what was expected, what to do."""

    exit_code = EXIT_REFUSED

    def __str__(self) -> str:
        return " ".join(super().__str__().split("\n"))  # one line, whatever a user's text holds


class ConfigError(UserError):
    """A config that can't be run."""


class DataError(UserError):
    """A corpus, a token store or a tokenizer that can't be used."""


class StorageError(UserError):
    """The run folder can't be written or read. Transient: a launcher tries the group again."""

    exit_code = EXIT_FAILED


def tell(why: str) -> None:
    """Say why this process ends, in one line on stderr, and in the file where torchrun looks for it."""
    print(f"outlast: {why}", file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = {"message": why, "extraInfo": {"py_callstack": why, "timestamp": str(int(time.time()))}}
        try:
            with open(file, "w") as f:  # noqa: PTH123
                json.dump({"message": text}, f)
        except OSError:
            pass  # it was said, and there is nowhere else to say it
