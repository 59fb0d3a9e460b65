"""Reading a config: TOML and `--section.key=value`.

One parser serves both: a TOML file is turned into arguments that stand before the user's own, and `tyro` reads them
into the dataclasses. So a TOML key and a flag have the same name, type and check, and the user's flag wins.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import time
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from outlast.config.checking import check_config
from outlast.config.own import options
from outlast.config.sections import DEFAULT_TRAINER, Config
from outlast.errors import ConfigError

C = TypeVar("C", bound=Config)


def load_config(
    file: str | Path | None, args: Sequence[str] = (), cls: type[C] = Config, prog: str = "outlast", check: bool = True
) -> C:
    """Read a TOML file and `--section.key=value` arguments into a checked config.

    Args:
        file: TOML with one table a section, or None for the defaults.
        args: the user's arguments; they win over the file. `--help` prints every field and exits.
        cls: `Config`, or a subclass with sections of one's own.
        prog: command shown in `--help`.
        check: look at the whole; a command that completes the config first does it then.

    Raises:
        ConfigError: naming the key, what was found, what was expected and the nearest right name.
    """
    fields = _flat_fields(cls)
    read = _parse([*_toml_args(file, cls), *_normal_args(args, fields)], cls, prog)
    if check:
        check_config(read)
    return read


def _parse(args: list[str], cls: type[C], prog: str) -> C:
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=args, prog=prog, use_underscores=True)
    except SystemExit as end:
        if not end.code:
            raise
        # tyro draws a box; one line is what a log and a person in a hurry can use.
        words = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─━┃┏┓┗┛]", " ", said.getvalue())
        raise ConfigError("config: " + " ".join(words.split())) from None


def _flat_fields(cls: type) -> dict[str, Any]:
    """`section.key` -> type, for every leaf."""
    hints = typing.get_type_hints(cls)
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            inner = typing.get_type_hints(kind)
            out |= {f"{f.name}.{g.name}": inner[g.name] for g in dataclasses.fields(kind)}
        else:
            out[f.name] = kind
    return out


def _nearest(name: str, known: Sequence[str]) -> str:
    same = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]  # a right key in a wrong section
    near = difflib.get_close_matches(name, same, 1, 0) or difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "; `outlast train --help` lists all"


def _fits(value: Any, kind: Any) -> bool:
    for k in options(kind):
        if typing.get_origin(k) is Literal:
            if value in typing.get_args(k):
                return True
        elif k is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif typing.get_origin(k) in (tuple, list):
            if isinstance(value, list):
                return True
        elif type(value) is k:
            return True
    return False


def _describe(kind: Any) -> str:
    names = []
    for k in options(kind):
        if typing.get_origin(k) is Literal:
            names.append("one of " + ", ".join(repr(v) for v in typing.get_args(k)))
        elif k is not type(None):
            names.append(getattr(k, "__name__", str(k)))
    return " or ".join(names)


def _toml_args(file: str | Path | None, cls: type) -> list[str]:
    if file is None:
        return []
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it isn't UTF-8 text"
        raise ConfigError(f"config file {file}: {why}; give the path of a TOML file") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"config file {file}: not valid TOML: {e}") from None
    known = _flat_fields(cls)
    sections = {k.split(".")[0] for k in known if "." in k}
    out: list[str] = []
    for key, value in _leaves(tables, sections, file):
        if key not in known:
            raise ConfigError(f"config file {file}: unknown key {key}{_nearest(key, list(known))}")
        if not _fits(value, known[key]):
            raise ConfigError(
                f"config file {file}: {key} = {value!r} has the wrong type or value; expected {_describe(known[key])}"
            )
        if isinstance(value, list) and not all(isinstance(v, str) for v in value):
            raise ConfigError(f"config file {file}: {key} = {value!r}: expected a list of strings")
        out += _normal_args([f"--{key}={_flag_text(value)}"], known)
    return out


def _flag_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(tables: dict[str, Any], sections: set[str], file: str | Path) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            if name not in sections:
                raise ConfigError(f"config file {file}: unknown section [{name}]{_nearest(name, sorted(sections))}")
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        elif name in sections:
            raise ConfigError(f"config file {file}: {name} = {value!r} should be a table, [{name}]")
        else:
            yield name, value


def _normal_args(args: Sequence[str], known: dict[str, Any]) -> list[str]:
    """Refuse unknown flags with the nearest name; spell booleans as tyro wants them.

    `--x.enable`, `--x.enable=true`, `--x.enable true` and `--x.no-enable` all work.
    """
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg in ("--help", "-h"):
            out.append(arg)
            continue
        if not arg.startswith("--"):
            if not out or "=" in out[-1]:
                raise ConfigError(f"unexpected argument {arg!r}; settings are given as --section.key=value")
            out.append(arg)
            continue
        name, eq, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        positive = re.sub(r"(^|\.)no_(?=[^.]+$)", r"\1", name)
        if known.get(positive) is bool:
            if not eq and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            value = value.lower() or "true"
            if value not in ("true", "false"):
                raise ConfigError(f"--{name}={value}: expected true or false")
            on = (value == "true") == (positive == name)
            section, _, leaf = positive.rpartition(".")
            dotted = f"{section}." if section else ""
            out.append(f"--{dotted}{'' if on else 'no-'}{leaf}")
            continue
        if name not in known:
            raise ConfigError(f"unknown setting --{name}{_nearest(name, list(known)).replace('mean ', 'mean --')}")
        if not eq:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name}: a value is missing; write --{name}=VALUE")
            value = rest.pop(0)
        if typing.get_origin(known[name]) is tuple:
            out += [f"--{name}", *filter(None, (v.strip() for v in value.split(",")))]
            continue
        out.append(f"--{name}={value}")
    return out


def to_toml(c: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            continue  # a command's own option, not a setting of the run
        lines.append(f"[{section.name}]")
        for key, value in dataclasses.asdict(part).items():
            if value is None:
                continue
            if isinstance(value, tuple):
                text = f"[{', '.join(map(_toml_string, value))}]"
            else:
                text = _toml_string(value) if isinstance(value, str) else _flag_text(value)
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)


def _toml_string(text: str) -> str:
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'


# --- The run folder --------------------------------------------------------------------------------


def take_config_file(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config FILE` (or `--config=FILE`) out of a command's arguments.

    Raises:
        ConfigError: it has no value.
    """
    file, rest, left = None, [], list(args)
    while left:
        arg = left.pop(0)
        if arg == "--config":
            if not left:
                raise ConfigError("--config: a value is missing; give the path of a TOML file")
            file = left.pop(0)
        elif arg.startswith("--config="):
            file = arg.partition("=")[2]
        else:
            rest.append(arg)
    return file, rest


def with_long_names(args: Sequence[str]) -> list[str]:
    """A command's arguments with `--trainer` written as the setting that it is short for."""
    return [re.sub(r"^--trainer(?==|$)", "--job.trainer", arg) for arg in args]


def last_value(args: Sequence[str], name: str) -> str | None:
    """The last value given to a setting, before anything is checked."""
    value = None
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        flag, eq, text = arg.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            value = text if eq else following
    return value


def value_in_file(file: str | Path | None, section: str, key: str) -> Any:
    """A file's value of a setting, or None; a file that can't be read is refused later, with the reason."""
    try:
        return tomllib.loads(Path(file).read_text())[section][key] if file is not None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def asked_trainer(file: str | Path | None, args: Sequence[str]) -> str:
    """`job.trainer`, before anything is checked: it decides which settings there are."""
    value = last_value(args, "job.trainer") or value_in_file(file, "job", "trainer")
    return value if isinstance(value, str) else DEFAULT_TRAINER


def new_run_dir(file: str | Path | None, shared: bool = False) -> str:
    """Of a run that wasn't given a folder: `runs/NAME-TIME`; `runs/NAME` if groups started apart are to share it."""
    name = Path(file).stem if file else "run"
    return str(Path("runs") / (name if shared else f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))


def with_run_dir(config: C, run_dir: str) -> C:
    """The same config with another run folder."""
    return dataclasses.replace(config, job=dataclasses.replace(config.job, run_dir=run_dir))
