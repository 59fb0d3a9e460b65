"""Sections of one's own: what a trainer's config class may hold, and how a process that can't import it knows it.

A trainer's module imports torch, launch doesn't: there a description of the class crosses, as JSON, and a mirror of it
is made, with the same sections, types, defaults and trajectory. Imports no torch.
"""

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

from outlast.config.sections import Config
from outlast.errors import ConfigError

C = TypeVar("C", bound=Config)

_SCALARS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}


def options(kind: Any) -> tuple[Any, ...]:
    """Members of a union; else the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def check_class(cls: object) -> type[Config]:
    """The same, if it is a config class that can be read, written down and sent.

    Raises:
        ConfigError: it isn't; names what is wrong.
    """
    if not isinstance(cls, type) or not issubclass(cls, Config):
        raise ConfigError(f"config_class = {cls!r}: expected a subclass of outlast.config.Config")
    if not _is_frozen(cls):
        raise ConfigError(f"{cls.__name__}: expected @dataclass(frozen=True), as Config is")
    hints, ours = typing.get_type_hints(cls), typing.get_type_hints(Config)
    for section in dataclasses.fields(cls):
        kind = hints[section.name]
        if kind is ours.get(section.name):
            continue
        if not _is_frozen(kind):
            raise ConfigError(f"{cls.__name__}.{section.name}: expected a section, a @dataclass(frozen=True)")
        inner = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):
            where = f"{cls.__name__}: {section.name}.{f.name}"
            try:
                encoded(inner[f.name])
            except KeyError:
                raise ConfigError(
                    f"{where} is {getattr(inner[f.name], '__name__', inner[f.name])}; expected bool, int, float, str, "
                    "Literal, or one of them | None"
                ) from None
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{where} has no default; give it one")
        if section.default is dataclasses.MISSING and section.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{cls.__name__}.{section.name} has no default; write field(default_factory=…)")
    return cls


def _is_frozen(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls.__dict__["__dataclass_params__"].frozen


def encoded(kind: Any) -> list[Any]:
    """A field's type as JSON: a union's members, a `Literal` as the list of its values.

    Raises:
        KeyError: another kind of type.
    """
    names = {kind: name for name, kind in _SCALARS.items()}
    return [list(typing.get_args(k)) if typing.get_origin(k) is Literal else names[k] for k in options(kind)]


def _decoded(members: list[Any]) -> Any:
    kinds = [Literal[tuple(m)] if isinstance(m, list) else _SCALARS[m] for m in members]
    return typing.Union[tuple(kinds)]  # noqa: UP007


def described(cls: type[Config]) -> dict[str, Any]:
    """A checked config class as JSON."""
    hints, ours, default = typing.get_type_hints(cls), typing.get_type_hints(Config), cls()
    sections = {}
    for section in dataclasses.fields(cls):
        kind = hints[section.name]
        inner = typing.get_type_hints(kind)
        fields = [] if kind is ours.get(section.name) else dataclasses.fields(kind)
        sections[section.name] = {
            "class": kind.__name__,
            "fields": [[f.name, encoded(inner[f.name]), f.metadata.get("trajectory")] for f in fields],
            "default": dataclasses.asdict(getattr(default, section.name)),
        }
    return {"class": cls.__name__, "sections": sections}


def mirrored(description: dict[str, Any]) -> type[Config]:
    """A config class as `described` saw it: all but its documentation and its checks."""
    ours = typing.get_type_hints(Config)
    fields: list[Any] = []
    for name, section in description["sections"].items():
        kind = ours.get(name)
        if section["fields"]:
            inner = [
                (key, _decoded(members), dataclasses.field(metadata={} if t is None else {"trajectory": t}))
                for key, members, t in section["fields"]
            ]
            kind = dataclasses.make_dataclass(section["class"], inner, frozen=True, kw_only=True)
        assert kind is not None
        fields.append((name, kind, dataclasses.field(default=from_dict(kind, section["default"]))))
    return dataclasses.make_dataclass(description["class"], fields, bases=(Config,), frozen=True)


def from_dict(kind: Any, values: dict[str, Any]) -> Any:
    """A section of these values, which may come from JSON."""
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def config_from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """The inverse of `dataclasses.asdict`, also after JSON."""
    kinds = typing.get_type_hints(cls)
    return cls(**{name: from_dict(kinds[name], fields) for name, fields in values.items()})


def with_options(command: type[C], config: type[Config]) -> type[C]:
    """A command's own options, beside the sections of a trainer's config class."""
    if config is Config:
        return command
    # The config first: its defaults of our sections count.
    return typing.cast(type[C], dataclasses.make_dataclass(command.__name__, [], bases=(config, command), frozen=True))
