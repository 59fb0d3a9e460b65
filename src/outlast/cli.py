"""The command line. Imports no torch until a command needs it, so that help and errors come at once."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from outlast import __version__
from outlast.errors import EXIT_REFUSED, EXIT_STOPPED, UserError, tell

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("outlast.data.corpus:prepare_command", "make a corpus from text files, folders or JSON lines"),
    "train": ("outlast.train:train_command", "train in this process: plain, or as one group of a fault-tolerant job"),
    "launch": ("outlast.launch.supervisor:launch_command", "train on several replica groups on this machine"),
    "join": ("outlast.launch.supervisor:join_command", "add groups to a running job"),
    "audit": ("outlast.audit:audit_command", "check what a run promised, from its events"),
    "sample": ("outlast.sample:sample_command", "let the newest saved weights continue a text"),
    "demo": ("outlast.demo:demo_command", "train on three groups, kill two, check that the bits are the same"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 fine, 1 failed, 2 refused, 143 stopped as asked."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        print(f"outlast {__version__}")
        return 0
    if not args or args[0] in ("-h", "--help", "help"):
        print("usage: outlast COMMAND [OPTIONS]\n\ncommands:")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:8} {what}")
        print("\n`outlast COMMAND --help` tells more; `outlast train --help` lists every setting.")
        return 0 if args else EXIT_REFUSED
    try:
        if args[0] not in COMMANDS:
            raise UserError(f"unknown command {args[0]!r}; one of {', '.join(COMMANDS)}")
        return _command(COMMANDS[args[0]][0])(args[1:])
    except UserError as e:
        tell(str(e))
        return e.exit_code
    except KeyboardInterrupt:
        print("outlast: interrupted", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:  # `outlast audit RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _command(where: str) -> Callable[[list[str]], int]:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
