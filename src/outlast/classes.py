"""Classes that a config names as `module:Class`: found, looked at, and refused in one line before anything starts.

A bad name is the user's to put right, and so is whatever their module does while it is imported: all of it comes out
as a `ConfigError`. Imports no torch by itself; a trainer's module does.
"""

import difflib
import importlib
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from outlast.config import DEFAULT_TRAINER, Config, asked_trainer, load_config
from outlast.config.own import check_class
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.trainer import Trainer

T = TypeVar("T")

_GO_TOGETHER = {
    "open_data": ("data_facts", "batch", "build_model"),
    "data_facts": ("batch",),
}
"""Seam -> those whose defaults read what its default makes ready."""


def load_trainer(spec: str) -> "type[Trainer]":
    """The class that `job.trainer` names.

    Raises:
        ConfigError: there is no such class, or it can't train; says why.
    """
    from outlast.trainer import Trainer

    if spec == DEFAULT_TRAINER:
        return Trainer
    cls = load_class("job.trainer", spec, Trainer)
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"job.trainer = {spec!r}: {cls.__name__} is missing {missing}: define them")
    for seam, needs in _GO_TOGETHER.items():
        if not replaces(cls, seam):
            continue
        missing = [name for name in needs if getattr(cls, name) is getattr(Trainer, name)]
        if missing:
            raise ConfigError(
                f"job.trainer = {spec!r}: {cls.__name__} replaces {seam} and is missing {', '.join(missing)}: define "
                f"them too, or call super().{seam}()"
            )
    return cls


def config_class(trainer: "type[Trainer]") -> type[Config]:
    """The class of a trainer's config.

    Raises:
        ConfigError: it isn't one that can be read, written down and sent.
    """
    try:
        return check_class(trainer.config_class)
    except ConfigError as e:
        raise ConfigError(f"{trainer.__module__}.{trainer.__name__}: {e}") from None


def load_run_config(file: str | Path) -> Config:
    """The config that a run keeps in its folder, of any number of ranks, with the sections of its own trainer.

    Raises:
        ConfigError: it can't be read, or its trainer isn't there any more.
    """
    return load_config(file, cls=config_class(load_trainer(asked_trainer(file, ()))), check=False)


def replaces(cls: "type[Trainer]", seam: str) -> bool:
    """Whether a trainer has a seam of its own that doesn't call the default one."""
    from outlast.trainer import Trainer

    code = getattr(getattr(cls, seam), "__code__", None)
    return getattr(cls, seam) is not getattr(Trainer, seam) and (code is None or "super" not in code.co_names)


def load_class(setting: str, spec: str, base: type[T]) -> type[T]:
    """The class that a setting names; the working directory is looked in first.

    Args:
        setting: whose value it is, for the message.
        spec: `module:Class`.
        base: what it must be a subclass of.

    Raises:
        ConfigError: there is no such class; says why.
    """
    said = f"{setting} = {spec!r}"
    found = re.fullmatch(r"(\w+(?:\.\w+)*):(\w+)", spec)
    if not found:
        raise ConfigError(f"{said}: expected module:Class, for example my_trainer:MyTrainer")
    module, name = _import(said, found[1]), found[2]
    cls = getattr(module, name, None)
    if cls is None:
        subclasses = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base)]
        near = difflib.get_close_matches(name, subclasses, 1, 0.4)
        raise ConfigError(f"{said}: no {name} in {module.__file__}" + (f"; did you mean {near[0]}?" if near else ""))
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise ConfigError(f"{said}: {name} isn't a subclass of {base.__module__}.{base.__name__}")
    return cls


def _import(said: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name and (name == e.name or name.startswith(e.name + ".")):
            raise ConfigError(f"{said}: no module {e.name} in {here} or among the installed ones") from None
        raise ConfigError(f"{said}: {_where(e)}: {e}") from None
    except (Exception, SystemExit) as e:
        what = e.msg if isinstance(e, SyntaxError) else e
        raise ConfigError(f"{said}: {_where(e)}: {type(e).__name__}: {what}".rstrip(": ")) from None


def _where(error: BaseException) -> str:
    """`file:line` of what an import ended of: in the user's own files, if it passed through any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    ours = str(Path(__file__).parent)
    theirs = [f for f in frames if not f.filename.startswith((ours, sys.prefix, sys.base_prefix, "<"))]
    last = (theirs or frames)[-1]
    return f"{last.filename}:{last.lineno}"
