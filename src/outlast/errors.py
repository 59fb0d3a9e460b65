"""Errors that a user can cause, and the exit codes that every command keeps to.

Imports nothing but the standard library.
"""

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
