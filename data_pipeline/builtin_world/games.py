"""Whole games: who plays, what happens turn by turn, and the records it leaves.

A game depends on nothing but its split, kind, seed and index.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from animegamer.game import CharacterState, Instruction
from data_pipeline.builtin_world import words
from data_pipeline.builtin_world.attributes import LANDMARKS, SCARVES, Attributes
from data_pipeline.builtin_world.looks import CHARACTERS, LOOKS
from data_pipeline.builtin_world.motions import INTENSITIES, MOTIONS, SOLO, STAND
from data_pipeline.builtin_world.places import PLACES, TIMES
from data_pipeline.builtin_world.renderer import SceneSpec
from data_pipeline.builtin_world.rules import Before, state_change

KINDS = ("mixed", "standard", "skill", "long", "language")
# Who has a skill in training. Some have both: a name that comes with one skill alone stands in for
# the verb, and what the skill looks like is learnt only together with the name.
SKILLED = {"fly": ("Mavi", "Orin", "Pela", "Juno"), "drive": ("Bruk", "Juno", "Nilo", "Orin")}
OPENING_SHARE = 0.8
PAIR_SHARE = 0.45
ACROSS_SHARE = 0.45
PLACE_CHANGE, TIME_CHANGE = 0.45, 0.35
HELD_OUT_PERCENT = 10
# Share of training games with one hero in nearly every shot: what stays the same is learnt there
# first, before it has to be told whose it is.
STAR_SHARE = 0.35
# Share of turns of training games that take up who and what of one of the last turns.
REPEAT_SHARE, REPEAT_REACH = 0.25, 3
# What a player writes through a training game: everything mixed, or one language.
_SPEECH = {"mixed": 0.4, "en": 0.2, "zh": 0.2, "ja": 0.2}
# Canonical English, varied English, Chinese, Japanese.
_WORDING_SHARES = (0.60, 0.76, 0.88, 1.0)
_CANONICAL_SHARE = 0.75  # where a whole game is in one language
# "none" is drawn less often than the rest: games without an opening shot add to it.
_NONE_WEIGHT = 0.6


@dataclass(frozen=True)
class TurnPlan:
    """One turn of a game before it is drawn.

    Attributes:
        turn: Number of the turn, 0 for the opening shot.
        scene: What is drawn.
        instruction: What the player asked; None for the opening shot.
        language: Language of the instruction.
        change: State change; None for the opening shot.
    """

    turn: int
    scene: SceneSpec
    instruction: Instruction | None
    language: str
    change: CharacterState | None

    @property
    def action(self) -> str:
        """Canonical English action text, empty for the opening shot."""
        if self.instruction is None:
            return ""
        return words.action_text(self.scene.motion, self.scene.intensity)


@dataclass(frozen=True)
class Game:
    """All turns of one game with its hidden attributes."""

    name: str
    split: str
    seed: int
    heroes: tuple[str, ...]
    attributes: Attributes
    turns: tuple[TurnPlan, ...]


def is_held_out(character: str, motion: str, place: str) -> bool:
    """True for the combinations that never occur in training and validation games."""
    digest = hashlib.sha256(f"{character}|{motion}|{place}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def generate_game(
    split: str, index: int, seed: int = 0, kind: str = "mixed", language: str | None = None
) -> Game:
    """Plans one game.

    Args:
        split: train, validation or test; the splits share no game.
        index: Number of the game.
        seed: Seed of the whole data set.
        kind: "mixed" (1 to 10 turns, training data), "standard" (10 turns), "skill" (10 turns,
            several ask for skills that the character never showed), "long" (100 turns) or
            "language" (10 turns, the same game in every language).
        language: Writes every instruction in this language; None mixes languages. For
            "language", None takes English, Chinese and Japanese in turn by index.

    Raises:
        ValueError: For an unknown split or kind.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f"unknown split {split!r}; known: train, validation, test")
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    name = f"{split}-{kind}-{seed}-{index:06d}"
    story = f"{split}-{kind}-{seed}-{index:06d}"
    if kind == "language":
        language = language or words.LANGUAGES[index % len(words.LANGUAGES)]
        story = f"{split}-{kind}-{seed}-{index // len(words.LANGUAGES):06d}"
        name = f"{story}-{language}"
    digest = hashlib.sha256(story.encode()).digest()
    number = int.from_bytes(digest[:6], "big")
    return _Storyteller(number, split, kind, language).tell(name)


class _Storyteller:
    """Draws the turns of one game in order."""

    def __init__(self, number: int, split: str, kind: str, language: str | None) -> None:
        self._rng = random.Random(number)
        self._number, self._split, self._kind, self._language = number, split, kind, language
        self._slots: dict[str, str] = {}
        self._before: Before | None = None
        self._told: list[tuple[tuple[str, ...], str]] = []
        self._speech = "mixed"

    def tell(self, name: str) -> Game:
        rng = self._rng
        opening = self._kind != "mixed" or rng.random() < OPENING_SHARE
        if self._kind == "mixed":
            self._speech = rng.choices(list(_SPEECH), list(_SPEECH.values()))[0]
        length = {"mixed": rng.randint(1, 10) if opening else rng.randint(1, 3), "long": 100}.get(
            self._kind, 10
        )
        star = self._kind == "mixed" and rng.random() < STAR_SHARE
        heroes = self._characters(list(CHARACTERS), 1) if star else self._heroes()
        others = rng.sample([c for c in CHARACTERS if c not in heroes], 2)
        cast = [*heroes * (10 if star else 2), *others]  # heroes act twice as often
        attributes = self._attributes(heroes) if opening else Attributes()
        turns = []
        place, time = rng.choice(PLACES), rng.choice(TIMES)
        if opening:
            scene = SceneSpec(heroes, STAND, 1, place, time, "left", attributes)
            turns.append(TurnPlan(0, scene, None, "en", None))
            self._remember(scene, 0)
        for turn in range(1, length + 1):
            if turn > 1 or opening:
                place, time = self._move(place, time)
            turns.append(self._turn(turn, cast, place, time, attributes))
        return Game(
            name, self._split, self._number, heroes if opening else (), attributes, tuple(turns)
        )

    def _heroes(self) -> tuple[str, ...]:
        count = 1 if self._rng.random() < 0.5 else 2
        return self._characters(list(CHARACTERS), count)

    def _characters(self, cast: list[str], count: int) -> tuple[str, ...]:
        """One or two of the cast; two come from different films about half of the time."""
        first = self._rng.choice(cast)
        if count == 1:
            return (first,)
        across = self._rng.random() < ACROSS_SHARE
        others = [c for c in cast if c != first]
        fitting = [c for c in others if (LOOKS[c].film != LOOKS[first].film) == across]
        return first, self._rng.choice(fitting or others)

    def _attributes(self, heroes: tuple[str, ...]) -> Attributes:
        def draw(values: list[str]) -> str:
            weights = [_NONE_WEIGHT if value == "none" else 1.0 for value in values]
            return self._rng.choices(values, weights)[0]

        scarves = {hero: draw(list(SCARVES)) for hero in heroes}
        return Attributes(scarves, scarves[heroes[0]], draw(list(LANDMARKS)))

    def _move(self, place: str, time: str) -> tuple[str, str]:
        if self._rng.random() < PLACE_CHANGE:
            place = self._rng.choice([p for p in PLACES if p != place])
        if self._rng.random() < TIME_CHANGE:
            time = self._rng.choice([t for t in TIMES if t != time])
        return place, time

    def _turn(
        self, turn: int, cast: list[str], place: str, time: str, attributes: Attributes
    ) -> TurnPlan:
        characters, motion = self._cast_motion(turn, cast, place)
        self._told.append((characters, motion))
        intensity = self._rng.choice(INTENSITIES)
        slot = self._slots.get(characters[0], "left") if len(characters) == 1 else "left"
        scene = SceneSpec(characters, motion, intensity, place, time, slot, attributes)
        change = state_change(characters, motion, intensity, time, self._before)
        language, choice = self._wording()
        asked = words.instruction(characters, motion, intensity, place, time, language, choice)
        self._remember(scene, change.stamina)
        return TurnPlan(turn, scene, asked, language, change)

    def _cast_motion(self, turn: int, cast: list[str], place: str) -> tuple[tuple[str, ...], str]:
        """Who does what here, within what this kind of game may ask."""
        rng = self._rng
        if self._kind == "skill" and turn % 3 == 2:
            without = {m: [c for c in cast if c not in owners] for m, owners in SKILLED.items()}
            motion = rng.choice([m for m in SKILLED if without[m]])
            return (rng.choice(without[motion]),), motion
        # Solo and not everyone's: told of twice as often, so that every owner is seen at it.
        motions = (*MOTIONS, *SKILLED) if self._kind == "mixed" else MOTIONS
        while True:
            motion = rng.choice(motions)
            characters: tuple[str, ...]
            if self._kind == "mixed" and self._told and rng.random() < REPEAT_SHARE:
                characters, motion = rng.choice(self._told[-REPEAT_REACH:])
            elif motion in SOLO:
                characters = (rng.choice(SKILLED[motion]),)
            else:
                characters = self._characters(cast, 2 if rng.random() < PAIR_SHARE else 1)
            free = self._split == "test"
            if free or not any(is_held_out(c, motion, place) for c in characters):
                return characters, motion

    def _wording(self) -> tuple[str, int]:
        draw, choice = self._rng.random(), self._rng.randint(1, 35)
        if self._kind != "mixed" and self._language is None:
            return "en", 0
        if self._language is not None:
            return self._language, 0
        if self._speech != "mixed":
            return self._speech, 0 if draw < _CANONICAL_SHARE else choice
        canonical, varied, chinese, _ = _WORDING_SHARES
        if draw < canonical:
            return "en", 0
        if draw < varied:
            return "en", choice
        return ("zh", choice) if draw < chinese else ("ja", choice)

    def _remember(self, scene: SceneSpec, stamina: int) -> None:
        self._slots = dict(zip(scene.characters, scene.end_slots(), strict=True))
        self._before = Before(scene.motion, stamina, scene.characters)
