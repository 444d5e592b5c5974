"""Key tables: what each name in the authors' files becomes in ours, written out row by row.

A row reads the same in both directions. A name that no row knows is an error, and so is a row's
name that a file lacks: nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from animegamer.checkpoint import CheckpointError
from animegamer.convert.tensors import LazyTensor, Tensors, TorchFile

_PLACES = {"p": "weight|bias", "rest": ".+"}  # every other placeholder is a number


@dataclass(frozen=True)
class Row:
    """One kind of tensor.

    Placeholders such as ``{n}`` stand for a number, ``{p}`` for ``weight`` or ``bias``, ``{rest}``
    for anything.

    Attributes:
        theirs: name in the authors' file.
        ours: names in our files, ``<file>/<name>``; none if the tensor is not used.
        chunks: for each of ours, which equal parts of theirs (along the first axis) make it up.
        reason: why it is not used; such tensors travel in ``release_extras.safetensors``.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    chunks: tuple[tuple[int, ...], ...] = ((0,),)
    reason: str = ""

    @property
    def parts(self) -> int:
        """Into how many equal parts theirs is cut."""
        return sum(map(len, self.chunks))


def _pattern(template: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{_PLACES.get(name, '[0-9]+')})"

    return re.compile(re.sub(r"\\\{(\w+)\\\}", group, re.escape(template)))


class KeyTable:
    """Rows, searched by their name or by ours.

    Args:
        rows: the table.
        what: what the authors' file is, for messages.
    """

    def __init__(self, rows: Iterable[Row], what: str) -> None:
        self.rows, self.what = tuple(rows), what
        self._theirs = [(_pattern(row.theirs), row) for row in self.rows]
        self._ours = [(_pattern(name), row) for row in self.rows for name in row.ours]

    def find(self, key: str) -> tuple[Row, tuple[str, ...]] | None:
        """The row of a name in the authors' file, and what it becomes."""
        for pattern, row in self._theirs:
            if match := pattern.fullmatch(key):
                return row, tuple(name.format(**match.groupdict()) for name in row.ours)
        return None

    def origin(self, name: str) -> tuple[Row, str, tuple[str, ...]] | None:
        """The row of one of our names, their name, and all of ours that it is made into."""
        for pattern, row in self._ours:
            if match := pattern.fullmatch(name):
                places = match.groupdict()
                ours = tuple(each.format(**places) for each in row.ours)
                return row, row.theirs.format(**places), ours
        return None


@dataclass
class Converted:
    """What a file of the authors becomes.

    Attributes:
        source: the file.
        table: its key table.
        files: our tensors by file and name.
        extras: unused tensors by their own name.
        keys: their name of each of ours, ``<file>/<name>``.
        reasons: how many tensors are unused, by reason.
    """

    source: TorchFile
    table: KeyTable
    files: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    extras: dict[str, LazyTensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def __getitem__(self, file: str) -> dict[str, LazyTensor]:
        return self.files.get(file, {})

    def shape(self, file: str, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there. Raises CheckpointError."""
        tensor = self[file].get(name)
        if tensor is None:
            raise self._missing(file, name, f"of {dimensions} dimensions")
        if len(tensor.shape) != dimensions:
            raise CheckpointError(
                f"{self.source.path}: key {self.keys[f'{file}/{name}']} has the shape "
                f"{tensor.shape}, expected {dimensions} dimensions"
            )
        return tensor.shape

    def _missing(self, file: str, name: str, expected: str) -> CheckpointError:
        origin = self.table.origin(f"{file}/{name}")
        assert origin is not None, f"no row of the table gives {file}/{name}"
        return CheckpointError(
            f"{self.source.path}: key {origin[1]} is missing, expected a tensor {expected}: not a "
            f"whole {self.table.what}"
        )

    def expect(self, file: str, shapes: Mapping[str, Iterable[int]]) -> None:
        """Checks that a file of ours has exactly these tensors.

        Raises:
            CheckpointError: names their key and what was expected.
        """
        found, path = self[file], self.source.path
        for name, wanted in shapes.items():
            shape = tuple(wanted)
            if name not in found:
                raise self._missing(file, name, f"that gives {name} the shape {shape}")
            if found[name].shape != shape:
                raise CheckpointError(
                    f"{path}: key {self.keys[f'{file}/{name}']} gives {name} the shape "
                    f"{found[name].shape}, expected {shape} by the sizes of the file's other "
                    "tensors"
                )
        for name in found.keys() - shapes.keys():
            raise CheckpointError(
                f"{path}: key {self.keys[f'{file}/{name}']} is one too many, expected no {name} in "
                f"a {self.table.what} of these sizes"
            )


def convert(source: TorchFile, table: KeyTable) -> Converted:
    """Sorts every tensor of a file by the table.

    Raises:
        CheckpointError: if a name is unknown, or a tensor cannot be cut as its row says.
    """
    result = Converted(source, table)
    unknown = [key for key in source.tensors if table.find(key) is None]
    if unknown:
        more = f" and {len(unknown) - 1} others are" if len(unknown) > 1 else " is"
        raise CheckpointError(
            f"{source.path}: key {unknown[0]}{more} unknown ({len(source.tensors)} keys in all); "
            f"expected a {table.what}, with keys such as {_example(table)}"
        )
    for key, tensor in source.tensors.items():
        row, names = table.find(key) or (Row(key), ())
        if not names:
            result.extras[key] = tensor
            result.reasons[row.reason] += 1
        elif row.parts > 1 and (not tensor.shape or tensor.shape[0] % row.parts):
            raise CheckpointError(
                f"{source.path}: key {key} has shape {tensor.shape}, expected {row.parts} equal "
                "parts along the first axis"
            )
        for name, chunks in zip(names, row.chunks, strict=False):
            file, _, own = name.partition("/")
            if name in result.keys:
                raise CheckpointError(
                    f"{source.path}: keys {result.keys[name]} and {key} are the same weight, "
                    "expected one of them"
                )
            result.files.setdefault(file, {})[own] = _cut(tensor, chunks, row.parts)
            result.keys[name] = key
    return result


def restore(table: KeyTable, files: Mapping[str, Tensors]) -> dict[str, LazyTensor]:
    """The authors' tensors of ours.

    Args:
        table: the key table.
        files: our tensors by file and name.

    Raises:
        CheckpointError: if a tensor has no place in the authors' file, or one of its parts is
            missing.
    """
    result: dict[str, LazyTensor] = {}
    for file, tensors in files.items():
        for name in tensors:
            origin = table.origin(f"{file}/{name}")
            if origin is None:
                raise CheckpointError(f"{file}: weight {name} has no place in a {table.what}")
            row, key, ours = origin
            if key in result:
                continue
            pieces = []
            for each in ours:
                part, _, own = each.partition("/")
                if own not in files.get(part, {}):
                    raise CheckpointError(f"{part}: weight {own} is missing, {key} needs it")
                pieces.append(files[part][own])
            result[key] = _join(pieces, row)
    return result


def _example(table: KeyTable) -> str:
    row = next(row for row in table.rows if "{n}" in row.theirs or "{i}" in row.theirs)
    return re.sub(r"\{p\}", "weight", re.sub(r"\{[a-o]\}", "0", row.theirs))


def _cut(tensor: LazyTensor, chunks: tuple[int, ...], parts: int) -> LazyTensor:
    if parts == 1:
        return tensor
    shape = (tensor.shape[0] // parts * len(chunks), *tensor.shape[1:])

    def make() -> torch.Tensor:
        pieces = tensor.make().chunk(parts)
        return torch.cat([pieces[i] for i in chunks])

    return LazyTensor(shape, tensor.dtype, make)


def _join(pieces: list[LazyTensor], row: Row) -> LazyTensor:
    if row.parts == 1:
        return pieces[0]

    def make() -> torch.Tensor:
        cut: dict[int, torch.Tensor] = {}
        for piece, chunks in zip(pieces, row.chunks, strict=True):
            cut |= dict(zip(chunks, piece.make().chunk(len(chunks)), strict=True))
        return torch.cat([cut[i] for i in range(row.parts)])

    rows = sum(piece.shape[0] for piece in pieces)
    return LazyTensor((rows, *pieces[0].shape[1:]), pieces[0].dtype, make)
