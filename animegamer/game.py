"""The game without its networks: instructions, character states, motion scope, history.

Nothing here imports torch, so that scripts answer ``--help`` at once and a game file can be
checked on any machine.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

STATE_NAMES = ("stamina", "social", "entertainment")
MAX_CHANGE = 5
"""Release: state changes are the tokens <Strength_-5> ... <Strength_5>."""


class InstructionError(ValueError):
    """An instruction, or a file of them, that cannot be read as the documented format."""


# The one instruction format, and the same keys as people type them in Chinese and Japanese.
_KEYS = {
    "characters": ("character", "characters", "角色", "人物", "キャラクター", "登場人物"),
    "motion": ("motion", "动作", "動作", "動き"),
    "background": ("background", "背景"),
}
_KEY_OF = {spelling: name for name, spellings in _KEYS.items() for spelling in spellings}
_FORMAT = "Character: A and B; Motion: gently talk to each other; Background: night town."
_COLON = re.compile("[:：]")
# "A, B, and C"; "A と B"; and without spaces A和B. Hiragana joins と to a name, as in さとみ.
_AND = re.compile(
    r"\s+and\s+|\s*[,&、，＆]\s*(?:and\s+)?|\s+[和与與と]\s+"
    r"|(?<=\w)[和与與](?=\w)|(?<=[^\Wぁ-ゖ])と(?=\w)|(?<=\w)と(?=[^\Wぁ-ゖ])",
    re.IGNORECASE,
)
MAX_INSTRUCTION_LENGTH = 600


@dataclass(frozen=True)
class Instruction:
    """What the player asks for in one turn: who, does what and how, where (paper Sec. 3.1).

    The three fields are free text in any language; characters keep their order.
    """

    characters: tuple[str, ...]
    motion: str
    background: str

    def __str__(self) -> str:
        """The line of an instruction file."""
        return (
            f"Character: {' and '.join(self.characters)}; Motion: {self.motion}; "
            f"Background: {self.background}."
        )

    @classmethod
    def parse(cls, line: str) -> Instruction:
        """Reads one line of an instruction file.

        Args:
            line: ``Character: A and B; Motion: gently talk; Background: night town.``; full-width
                punctuation and Chinese or Japanese keys are read too.

        Raises:
            InstructionError: with what is missing or unknown, and the expected format.
        """
        if len(line) > MAX_INSTRUCTION_LENGTH:
            raise InstructionError(
                f"instruction of {len(line)} characters; at most {MAX_INSTRUCTION_LENGTH} are read"
            )
        if any(unicodedata.category(c) in ("Cc", "Cs") and c != "\t" for c in line.strip()):
            raise InstructionError(f"control character in instruction {line.strip()!r}")
        values: dict[str, str] = {}
        for part in re.split(r"[;；]", line.rstrip(".。;； \t\r\n")):
            if not part.strip():
                continue
            key, *value = _COLON.split(part, maxsplit=1)
            name = _KEY_OF.get(key.strip().lower())
            if not value or name is None:
                raise InstructionError(
                    f"cannot read {part.strip()!r}: expected 'Character:', 'Motion:' or "
                    f"'Background:', as in {_FORMAT!r}"
                )
            if name in values:
                raise InstructionError(f"{key.strip()!r} is given twice in {line.strip()!r}")
            values[name] = " ".join(value[0].split())
        missing = [name for name in _KEYS if not values.get(name)]
        if missing:
            raise InstructionError(
                f"no {', no '.join(missing)} in {line.strip()!r}: expected {_FORMAT!r}"
            )
        characters = tuple(dict.fromkeys(c for c in _AND.split(values["characters"]) if c))
        if not characters:
            raise InstructionError(f"no character is named in {line.strip()!r}")
        return cls(characters, values["motion"], values["background"])


@dataclass(frozen=True)
class Script:
    """An instruction file: one instruction a turn, and optionally the picture it opens with."""

    instructions: tuple[Instruction, ...]
    opening: Path | None = None


def read_script(path: str | Path) -> Script:
    """Reads an instruction file (UTF-8, one instruction a line).

    Empty lines and lines that start with ``#`` are skipped. A line ``Opening: picture.png`` before
    the first instruction names the picture or shot of turn 0, relative to the file.

    Raises:
        InstructionError: names the file, the line and what was expected there.
        FileNotFoundError: if there is no such file, or no such opening picture.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no instruction file {path}")
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise InstructionError(
            f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    instructions: list[Instruction] = []
    opening: Path | None = None
    for number, line in enumerate(re.split("\r\n|\n|\r", text), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, *value = _COLON.split(line, maxsplit=1)
        if value and key.strip().lower() == "opening":
            if instructions or opening is not None:
                raise InstructionError(
                    f"{path}:{number}: 'Opening:' stands once, before the first instruction"
                )
            opening = path.parent / value[0].strip()
            if not opening.is_file():
                raise FileNotFoundError(f"{path}:{number}: no opening picture {opening}")
            continue
        try:
            instructions.append(Instruction.parse(line))
        except InstructionError as error:
            raise InstructionError(f"{path}:{number}: {error}") from None
    if not instructions:
        raise InstructionError(f"{path}: holds no instruction; expected lines like {_FORMAT!r}")
    return Script(tuple(instructions), opening)


@dataclass(frozen=True)
class CharacterState:
    """Change of a character's stamina, social and entertainment values in one turn, -5 to 5."""

    stamina: int
    social: int
    entertainment: int

    def __post_init__(self) -> None:
        for name in STATE_NAMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_CHANGE:
                raise ValueError(
                    f"{name} change is {value!r}, expected an integer from {-MAX_CHANGE} to "
                    f"{MAX_CHANGE}"
                )

    def as_dict(self) -> dict[str, int]:
        """Name to change, in the order of the paper."""
        return {name: getattr(self, name) for name in STATE_NAMES}


@dataclass(frozen=True)
class MotionScope:
    """Motion scope ``f_ms``: the level that the MLLM predicts and the scalar the decoder takes.

    Release: the command line's table; its web app has another one (0.5, 1, 5, 20, 40).
    """

    level: int
    SCALARS: ClassVar[tuple[float, ...]] = (0.5, 2.5, 10.0, 15.0, 40.0)

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in range(1, len(self.SCALARS) + 1):
            raise ValueError(
                f"motion level is {self.level!r}, expected an integer from 1 to {len(self.SCALARS)}"
            )

    @property
    def scalar(self) -> float:
        """The number that the decoder embeds."""
        return self.SCALARS[self.level - 1]


@dataclass(frozen=True)
class MeterRules:
    """How a state change moves a meter. Release: start 50, 0 to 100, steps of 5, decay 5."""

    start: int = 50
    maximum: int = 100
    meter_step: int = 5
    idle_decay: int = 5


@dataclass
class Meters:
    """The meters of every character met so far.

    Release: one triple of meters for the whole game, and a social or entertainment change of
    zero costs ``idle_decay``. Deviation: the triple applies to every character named, and each
    has meters of its own.
    """

    rules: MeterRules = field(default_factory=MeterRules)
    values: dict[str, dict[str, int]] = field(default_factory=dict)

    def apply(self, characters: Iterable[str], change: CharacterState) -> dict[str, dict[str, int]]:
        """Applies one turn's change to the named characters.

        Returns:
            The new meters of the named characters, by character and state name.
        """
        rules = self.rules
        for character in characters:
            meters = self.values.setdefault(character, dict.fromkeys(STATE_NAMES, rules.start))
            for name, step in change.as_dict().items():
                delta = step * rules.meter_step
                if step == 0 and name != "stamina":
                    delta = -rules.idle_decay
                meters[name] = min(rules.maximum, max(0, meters[name] + delta))
        return {character: dict(self.values[character]) for character in characters}


@dataclass(frozen=True)
class GameState:
    """Game state s (paper Sec. 3.1): the shot's representation and the character's state.

    Attributes:
        motion_scope: motion scope of the shot; None for an opening shot.
        change: state change of every character named; None for an opening shot.
        s_a: action-aware multimodal representation, float array (N, D), or None.
        shot: the drawn frames, uint8 (F, H, W, 3), or None where only the MLLM has run.
    """

    motion_scope: MotionScope | None
    change: CharacterState | None
    s_a: Any = None
    shot: np.ndarray | None = None


@dataclass(frozen=True)
class Turn:
    """One turn of a game: what was asked and what came. Turn 0 (an opening) asks nothing."""

    instruction: Instruction | None
    state: GameState


@dataclass
class History:
    """The turns played so far, and the part of them that the next prediction sees.

    Args:
        window: turns that the model sees, the current one included; 1 is no history.
        sink: turns at the very front that stay in view when the window has moved past them
            (0 or 1); they count towards the window.
    """

    window: int
    sink: int = 0
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, expected 1 (no history) or more")
        if self.sink not in (0, 1):
            raise ValueError(f"sink is {self.sink}, expected 0 or 1")

    def visible(self) -> list[Turn]:
        """The past turns inside the window, in order, the sink turn first."""
        return visible_turns(self.turns, self.window, self.sink)

    def append(self, turn: Turn) -> None:
        """Adds the turn just played and forgets what no later turn can see."""
        self.turns.append(turn)
        keep = max(self.window - 1, 1)
        if len(self.turns) > keep + 1:
            del self.turns[1 : len(self.turns) - keep]


def visible_turns(turns: Sequence[Any], window: int, sink: int) -> list[Any]:
    """Which of ``turns`` (all before the current one) the model sees, in order."""
    room = window - 1
    if room <= 0:
        return []
    if len(turns) <= room:
        return list(turns)
    if sink and room > sink:
        return list(turns[:sink]) + list(turns[len(turns) - (room - sink) :])
    return list(turns[len(turns) - room :])
