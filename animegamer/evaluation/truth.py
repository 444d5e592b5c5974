"""What a shot shows: as recorded in ``shots.jsonl`` (the truth) or as read from its frames.

The truth comes from the records alone, never from the code that drew the shots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from animegamer.game import CharacterState
from animegamer.records import Episode, Shot

VEHICLE_MOTIONS = frozenset({"fly", "drive"})
"""Only these shots show the vehicle, and with it its colour."""
NO_SCARF = "none"


class TruthError(ValueError):
    """A record that lacks what evaluation needs; the message names the shot and the label."""


@dataclass(frozen=True)
class Reading:
    """What one shot shows.

    Attributes:
        characters: everyone in it.
        motion: canonical name of the motion.
        place: canonical name of the place.
        time_of_day: day, evening or night.
        level: motion level, 1 to 5: measured on the frames, not asked for.
        change: state change, None for an opening shot or where nothing was predicted.
        predicted_level: level that the game predicted; the truth has None.
        attributes: hidden attributes that the shot shows, such as ``scarf:Nilo`` -> ``red``,
            ``landmark`` -> ``windmill``, ``vehicle`` -> ``blue``.
    """

    characters: frozenset[str]
    motion: str
    place: str
    time_of_day: str
    level: int
    change: CharacterState | None = None
    predicted_level: int | None = None
    attributes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One turn of a held-out game: what was true and what the game gave.

    Attributes:
        game: episode, the unit that the bootstrap draws.
        turn: its turn, 1 and up.
        language: of the instruction.
        truth: the recorded shot.
        given: the generated shot as read by the judges, None where the game failed to give one.
        showings: for every hidden attribute in the shot that an earlier turn showed: how many
            turns ago it was last seen.
    """

    game: str
    turn: int
    language: str
    truth: Reading
    given: Reading | None
    showings: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class World:
    """What ``world.json`` beside the records says about their world.

    Attributes:
        edges: borders between the five motion levels.
        films: film of each character.
        skills: motion to the only characters that do it in the training data.
    """

    edges: tuple[float, ...]
    films: dict[str, str]
    skills: dict[str, tuple[str, ...]]

    @classmethod
    def read(cls, directory: str | Path) -> World:
        """Reads ``world.json``.

        Raises:
            TruthError: if it is missing or lacks something.
        """
        path = Path(directory) / "world.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            skills = {motion: _names(owners) for motion, owners in facts["skills"].items()}
            return cls(tuple(facts["level_edges"]), facts["films"], skills)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TruthError(
                f"{path}: cannot be used ({error!r}); draw the games again with "
                "python -m data_pipeline.builtin_world"
            ) from None

    def across_films(self, shot: Shot) -> bool:
        """Whether characters from two films meet in a shot."""
        return len({self.films.get(name, name) for name in shot.labels["characters"]}) > 1

    def unseen_skill(self, shot: Shot) -> bool:
        """Whether somebody does what only other characters do in the training data."""
        owners = self.skills.get(shot.labels["motion"])
        return owners is not None and any(c not in owners for c in shot.labels["characters"])


def _names(owners: object) -> tuple[str, ...]:
    if not isinstance(owners, list):
        raise TypeError(f"the characters with a skill are a list, not {owners!r}")
    return tuple(owners)


def read_truth(shot: Shot) -> Reading:
    """The recorded truth of a shot.

    Raises:
        TruthError: if a label is missing.
    """
    labels, hidden = shot.labels, shot.hidden
    for name in ("characters", "motion", "place", "time_of_day"):
        if not labels.get(name):
            raise TruthError(f"shot {shot.shot_id!r} has no label {name!r}: it cannot be judged")
    characters = frozenset(labels["characters"])
    attributes: dict[str, str] = {}
    for name, color in (hidden.get("scarves") or {}).items():
        if name in characters:
            attributes[f"scarf:{name}"] = color
    if "landmark" in hidden:
        attributes["landmark"] = hidden["landmark"]
    if "vehicle" in hidden and labels["motion"] in VEHICLE_MOTIONS:
        attributes["vehicle"] = hidden["vehicle"]
    return Reading(
        characters=characters,
        motion=labels["motion"],
        place=labels["place"],
        time_of_day=labels["time_of_day"],
        level=shot.motion_level,
        change=shot.change,
        attributes=attributes,
    )


def showings(shots: Sequence[Shot]) -> list[dict[str, int]]:
    """For each shot of a game: how many turns ago each of its hidden attributes was last shown.

    An attribute that no earlier turn showed cannot be known and is left out. Every shot counts as
    a showing, the opening (turn 0) too; a game without an opening shows its first turn as it
    likes, so only the games with one should be asked.
    """
    last: dict[str, int] = {}
    result = []
    for shot in shots:
        shown = read_truth(shot).attributes
        result.append({name: shot.turn - last[name] for name in shown if name in last})
        last.update(dict.fromkeys(shown, shot.turn))
    return result


def inside_window(distance: int, window: int) -> bool:
    """Whether a showing ``distance`` turns ago is among the last ``window`` - 1 turns.

    The turn being played counts towards the window, so a window of 1 sees no earlier turn. A sink
    turn further back does not count as inside: what it helps shows in the figure beyond.
    """
    return 1 <= distance < window


def has_opening(episode: Episode) -> bool:
    """Whether a game opens with a given shot (turn 0)."""
    return episode.shots[0].turn == 0


def game_name(shot: Shot) -> str:
    """The game of a shot, the same for its versions in several languages."""
    return shot.episode.removesuffix(f"-{shot.language}")
