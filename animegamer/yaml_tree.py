"""YAML files to frozen dataclasses, strictly: the mechanics behind ``config``. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key and expectation."""


def read(path: Path, check: Callable[[dict[str, Any], str], Any]) -> dict[str, Any]:
    """Reads a YAML file with its ``_base_`` files under it, as nested mappings.

    Args:
        path: the file.
        check: called with each file's own mapping and name, so that an error names the file at
            fault.

    Raises:
        ConfigError: no such file, not YAML, a cycle, or two bases that set one key.
    """
    return _read(path, (), check)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What changed between two configuration trees, one ``key: old -> new`` each."""
    changed = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return changed


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which keeps the last of two equal keys in silence; an error here."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if key.value in keys:
                mark = key.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} again", mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read(
    path: Path, seen: tuple[Path, ...], check: Callable[[dict[str, Any], str], Any]
) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: _base_ cycle: {' -> '.join(str(p) for p in [*seen, path])}")
    if not path.is_file():
        raise ConfigError(f"no configuration file {path}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(tree).__name__}")
    bases = tree.pop("_base_", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: _base_ is {bases!r}, expected a path or a list of paths")
    check(tree, str(path))
    merged: dict[str, Any] = {}
    for base in bases:
        branch = _read(path.parent / base, (*seen, path), check)
        clash = _leaves(merged).keys() & _leaves(branch).keys()
        if clash:
            raise ConfigError(f"{path}: two bases set {sorted(clash)[0]!r}")
        merged = merge(merged, branch)
    return merge(merged, tree)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` over ``old``: mappings merge, scalars and lists replace."""
    merged = dict(old)
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def build(kind: type, tree: Any, where: str, prefix: str = "") -> Any:
    """A dataclass from a mapping; unknown keys and wrong types are errors that name ``where``."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.')} is {tree!r}, expected a mapping")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for key, value in tree.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"{where}: unknown key {prefix}{key}{hint}")
        values[key] = _cast(hints[key], value, where, f"{prefix}{key}")
    return kind(**values)


def _cast(hint: Any, value: Any, where: str, key: str) -> Any:
    """Casts strictly: PyYAML reads 1e-4 as a string and ``on`` as True."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, f"{key}.")
    if origin is Literal and value is False and "no" in arguments:
        return "no"
    if origin is Literal and value in arguments:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _cast(next(a for a in arguments if a is not type(None)), value, where, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_cast(arguments[0], v, where, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(k): _cast(arguments[1], v, where, f"{key}.{k}") for k, v in value.items()}
    if hint is float and not isinstance(value, bool):
        try:
            if not math.isnan(number := float(value)):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    expected = " or ".join(map(repr, arguments)) if origin is Literal else _name(hint)
    raise ConfigError(f"{where}: {key} is {value!r}, expected {expected}")


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of {_name(typing.get_args(hint)[0])}"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(
        hint, str(hint)
    )


def plain(value: Any) -> Any:
    """Tuples as lists, at any depth, as YAML writes them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
