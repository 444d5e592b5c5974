"""How a turn changes stamina, social and entertainment, from the turn and the one before it."""

from __future__ import annotations

from dataclasses import dataclass

from animegamer.game import MAX_CHANGE, CharacterState

# Motion -> (effort at the lowest intensity, effort per step, social alone, social together, fun).
_BASE: dict[str, tuple[float, float, int, int, int]] = {
    "walk": (0.0, -0.5, 0, 1, 1),
    "run": (-1.0, -1.0, -1, 1, 1),
    "jump": (-1.0, -0.75, 0, 1, 2),
    "sit": (2.0, -0.5, 0, 1, -1),
    "lie down": (4.0, -0.75, -1, 0, -2),
    "wave": (0.0, -0.25, 2, 3, 1),
    "talk": (0.0, -0.25, 1, 4, 1),
    "read": (1.0, -0.5, -2, -1, 2),
    "dance": (-1.0, -1.0, 1, 3, 3),
    "eat": (3.0, -0.25, 0, 2, 1),
    "fly": (-1.0, -0.5, -1, -1, 4),
    "drive": (0.0, -0.5, -1, -1, 2),
}
_QUIET = frozenset({"sit", "lie down", "read"})
_LIVELY = frozenset({"run", "jump", "dance", "fly", "drive"})
_REST = frozenset({"sit", "lie down"})
EXHAUSTING = -3


@dataclass(frozen=True)
class Before:
    """What the next turn's change may depend on from the turn before it.

    Attributes:
        motion: Its motion; "stand" for an opening shot.
        stamina: Its stamina change, 0 for an opening shot.
        characters: Who was in it.
    """

    motion: str
    stamina: int
    characters: tuple[str, ...]


def state_change(
    characters: tuple[str, ...], motion: str, intensity: int, time: str, before: Before | None
) -> CharacterState:
    """The change of state of every character named in a turn.

    A table over motion and intensity, bent by company and time of day; nights tire the lively and
    refresh the quiet. From the turn before: doing the same again bores, rest after an exhausting
    turn restores more, talking twice running with the same company says less, and meeting
    somebody new is social.

    Args:
        characters: Who acts, one or two.
        motion: Canonical motion.
        intensity: 1 to 5.
        time: day, evening or night.
        before: The turn before, None at the start of a game.
    """
    effort, per_step, alone, together, fun = _BASE[motion]
    steps = intensity - 1
    stamina = int(effort + per_step * steps)
    social = together + (intensity >= 4) if len(characters) == 2 else alone
    entertainment = fun + (steps + 1) // 2 - 1 if motion in _LIVELY else fun - (intensity == 5)
    if time == "night":
        stamina += 1 if motion in _QUIET else -1 if motion in _LIVELY else 0
        social -= len(characters) == 1
    elif time == "evening":
        entertainment += 1 if len(characters) == 2 else 0
    if before is not None:
        if before.motion == motion:
            entertainment -= 1
        if motion in _REST and before.stamina <= EXHAUSTING:
            stamina += 2
        if (
            motion == "talk"
            and before.motion == "talk"
            and set(before.characters) == set(characters)
        ):
            social -= 2
        elif len(characters) == 2 and not set(characters) <= set(before.characters):
            social += 1
    return CharacterState(
        *(
            max(-MAX_CHANGE, min(MAX_CHANGE, int(value)))
            for value in (stamina, social, entertainment)
        )
    )
