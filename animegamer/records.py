"""The JSONL schema that every step writes and reads: clips, shots, episodes.

A film cut by the data pipeline and a film drawn by the built-in world give the same records.
No torch and no video here.
"""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from animegamer.atomic import write_text
from animegamer.game import CharacterState, Instruction

SPLITS = ("train", "validation", "test")


class RecordError(ValueError):
    """A record that does not follow the schema; the message names file, line and field."""


@dataclass(frozen=True)
class Clip:
    """A raw piece of a film, before anything is known about what it shows.

    Attributes:
        clip_id: unique name.
        film: the film it was cut from.
        path: video file, relative to the JSONL file.
        start: begin in the film, seconds.
        end: end in the film, seconds.
        scene: number of the scene in the film.
        rejected: why the clip must not be trained on, or None.
    """

    clip_id: str
    film: str
    path: str
    start: float
    end: float
    scene: int
    rejected: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 <= self.start < self.end < math.inf:
            raise RecordError(
                f"start is {self.start} and end {self.end}, expected 0 <= start < end (seconds)"
            )


@dataclass(frozen=True)
class Shot:
    """An annotated 2-second animation shot: one turn of an episode.

    Attributes:
        shot_id: unique name.
        film: the film of the first named character.
        split: train, validation or test.
        episode: the episode (game) it belongs to.
        turn: place in the episode; 0 is an opening shot, which nothing asks for.
        clip: video file, relative to the JSONL file: F frames at 8 fps.
        instruction: what a player would have typed; None for an opening shot.
        action: short English action text, the source of ``f_md``; empty for an opening shot. A
            captioned clip to pre-train on is a shot at turn 0 with its caption here.
        motion_scope: mean optical flow, pixels per frame of a 720-wide frame at 8 fps.
        motion_level: its level, 1 to 5.
        change: state change; None for an opening shot.
        language: language of the instruction (en, zh, ja).
        labels: canonical names of what is shown (characters, motion, adverb, intensity, place,
            time_of_day), where known.
        hidden: attributes that no instruction names, for evaluation only: training code reads
            records without them.
        seed: seed of a drawn shot, or None.
    """

    shot_id: str
    film: str
    split: str
    episode: str
    turn: int
    clip: str
    instruction: Instruction | None
    action: str
    motion_scope: float
    motion_level: int
    change: CharacterState | None
    language: str = "en"
    labels: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.split not in SPLITS:
            raise RecordError(f"split is {self.split!r}, expected one of {', '.join(SPLITS)}")
        if self.turn < 0:
            raise RecordError(f"turn is {self.turn}, expected 0 or more")
        if self.turn > 0 and (self.instruction is None or self.change is None):
            raise RecordError(f"turn {self.turn} has no instruction or no state change")
        if not 0 <= self.motion_scope < math.inf:
            raise RecordError(f"motion_scope is {self.motion_scope}, expected 0 or more")
        if self.motion_level not in range(1, 6):
            raise RecordError(f"motion_level is {self.motion_level!r}, expected 1 to 5")


@dataclass(frozen=True)
class Episode:
    """The shots of one game in turn order."""

    episode: str
    shots: tuple[Shot, ...]


T = TypeVar("T")
Record = TypeVar("Record", Clip, Shot)


@functools.cache
def _types(make: Any) -> dict[str, tuple[type, ...]]:
    """Field name to the types it may have; whole numbers pass for seconds and flow."""
    types = {}
    for name, hint in typing.get_type_hints(make).items():
        kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
        types[name] = (*kinds, int) if float in kinds else kinds
    return types


def _check_types(record: Clip | Shot) -> None:
    make: Any = type(record)  # a class is hashable; mypy doubts it for dataclasses
    for name, kinds in _types(make).items():
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            expected = " or ".join("null" if k is NoneType else k.__name__ for k in kinds)
            raise RecordError(f"{name} is {value!r}, expected {expected}")


def _fill(make: type[T], value: Any, place: str = "") -> T:
    """Builds a dataclass from a JSON object that has its fields and no others."""
    if not isinstance(value, dict):
        raise RecordError(f"{place or 'the line'} is {value!r}, expected an object")
    known = {f.name: f for f in fields(make)}  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            raise RecordError(f"unknown field {name!r}{place and f' in {place}'}")
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise RecordError(f"no field {name!r}{place and f' in {place}'}")
    return make(**value)


def _instruction(value: Any) -> Instruction:
    instruction = _fill(Instruction, value, "instruction")
    names: Any = instruction.characters
    texts = [*names, instruction.motion, instruction.background] if type(names) is list else []
    if not names or not texts or not all(type(text) is str for text in texts):
        raise RecordError(f"instruction is {value!r}, expected a list of names and two texts")
    return replace(instruction, characters=tuple(names))


def _shot(value: Any) -> Shot:
    if isinstance(value, dict):
        value = dict(value)
        if value.get("instruction") is not None:
            value["instruction"] = _instruction(value["instruction"])
        if value.get("change") is not None:
            value["change"] = _fill(CharacterState, value["change"], "change")
    return _fill(Shot, value)


def _read(path: Path, make: Callable[[Any], Record]) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield make(json.loads(line.decode("utf-8")))
            except ValueError as error:  # of JSON, UTF-8, a record or a state change
                raise RecordError(f"{path}:{number}: {error}") from None


def read_clips(path: str | Path) -> list[Clip]:
    """Reads ``clips.jsonl``. Raises RecordError with file and line."""
    return list(_read(Path(path), functools.partial(_fill, Clip)))


def read_shots(path: str | Path, *, hidden: bool = False) -> list[Shot]:
    """Reads ``shots.jsonl``.

    Args:
        path: the file.
        hidden: keep the hidden attributes. Evaluation alone asks for them.

    Raises:
        RecordError: names the file, the line and what was expected.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no shots file {path}: draw or prepare the data first")
    shots = list(_read(path, _shot))
    if not hidden:
        for shot in shots:
            shot.hidden.clear()
    return shots


def read_episodes(path: str | Path, *, hidden: bool = False) -> list[Episode]:
    """Reads ``shots.jsonl`` and groups its shots into episodes, in file order.

    Raises:
        RecordError: also where an episode's turns are not consecutive.
    """
    groups: dict[str, list[Shot]] = {}
    for shot in read_shots(path, hidden=hidden):
        groups.setdefault(shot.episode, []).append(shot)
    episodes = []
    for name, shots in groups.items():
        shots.sort(key=lambda shot: shot.turn)
        turns = [shot.turn for shot in shots]
        if turns != list(range(turns[0], turns[0] + len(turns))):
            raise RecordError(f"{path}: episode {name!r} has turns {turns}, expected no gap")
        episodes.append(Episode(name, tuple(shots)))
    return episodes


def to_json(record: Clip | Shot) -> str:
    """One JSONL line, without the newline."""
    return json.dumps(asdict(record), ensure_ascii=False)


def write_jsonl(path: str | Path, records: Iterable[Clip | Shot]) -> None:
    """Writes records to a JSONL file, whole or not at all."""
    write_text(path, "".join(to_json(record) + "\n" for record in records))
