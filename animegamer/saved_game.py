"""A played game on disk: ``game.json`` and ``s_a_hat.safetensors`` in one folder.

The MLLM script writes it, the decoder script reads it and puts ``turn_01.mp4`` ... beside it, so
that the two networks need not share a machine. The format is described in game_demo/README.md.
No torch here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from animegamer import __version__
from animegamer.atomic import write_bytes, write_text
from animegamer.checkpoint import CheckpointError
from animegamer.config import Config, ConfigError
from animegamer.game import (
    CharacterState,
    GameState,
    Instruction,
    InstructionError,
    MeterRules,
    MotionScope,
)
from animegamer.opening import OpeningError, read_opening
from animegamer.video import VideoError, resize, write_video
from animegamer.vocabulary import VocabularyError

FORMAT = "animegamer game"
VERSION = 1
GAME_FILE = "game.json"
STATES_FILE = "s_a_hat.safetensors"
STORYBOARD_FILE = "storyboard.png"
OPENING_FILE = "turn_00.png"


class SavedGameError(ValueError):
    """A saved game that cannot be read; the message names the file and what was expected."""


PLAYER_ERRORS = (
    ConfigError,
    InstructionError,
    CheckpointError,
    OpeningError,
    VocabularyError,
    SavedGameError,
    VideoError,
    OSError,
)
"""What a player can set right: one line to read, not a traceback."""


def turn_key(turn: int) -> str:
    """Name of a turn's tensor, and of its video without ``.mp4``: ``turn_01``."""
    return f"turn_{turn:02d}"


@dataclass(frozen=True)
class SavedTurn:
    """One turn of a saved game.

    Attributes:
        instruction: what the player asked for.
        motion_scope: predicted motion scope.
        change: predicted state change.
        meters: meters of the named characters after the turn.
    """

    instruction: Instruction
    motion_scope: MotionScope
    change: CharacterState
    meters: dict[str, dict[str, int]]


@dataclass
class SavedGame:
    """A game as it was played.

    Attributes:
        folder: where its files lie.
        name: of the instruction file, without its ending.
        settings: what the game was played with.
        opening: picture or shot that the game opened with, or None.
        opening_frame: its first frame as the model saw it, uint8 (H, W, 3), or None.
        turns: turn 1, 2, ...
        s_a_hat: per turn, float32 (N, D).
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    opening: str | None = None
    opening_frame: np.ndarray | None = None
    turns: list[SavedTurn] = field(default_factory=list)
    s_a_hat: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        config: Config,
        folder: str | Path,
        script: str | Path,
        opening: str | Path | None = None,
    ) -> SavedGame:
        """An empty record of a game that is about to be played.

        Args:
            config: resolved configuration.
            folder: where its files are to lie.
            script: its instruction file.
            opening: picture or shot it opens with, or None.

        Raises:
            OpeningError: if that is neither picture nor shot.
        """
        play = config.play
        settings = {
            "checkpoint": play.checkpoint,
            "seed": play.seed,
            "window": play.window,
            "sink": play.sink,
            "history": play.history,
            "fps": config.shot.fps,
            "upscale": play.upscale,
            "meters": asdict(play.meters),
        }
        game = cls(Path(folder), Path(script).stem, settings)
        if opening is not None:
            game.opening = Path(opening).as_posix()
            game.opening_frame = read_opening(opening, config.shot)[0]
        return game

    def add(
        self, instruction: Instruction, state: GameState, meters: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Records a turn that has been played; writes its video at once where it has been drawn.

        Args:
            instruction: what was asked.
            state: what came of it.
            meters: meters of the named characters after the turn.
        """
        if state.motion_scope is None or state.change is None or state.s_a is None:
            raise ValueError("a played turn has a motion scope, a state change and an s_a")
        copied = {name: dict(values) for name, values in meters.items()}
        self.turns.append(SavedTurn(instruction, state.motion_scope, state.change, copied))
        self.s_a_hat.append(np.asarray(state.s_a, np.float32))
        if state.shot is not None:
            self.write_shot(len(self.turns), state.shot, self.settings["upscale"])

    def write_shot(self, turn: int, shot: np.ndarray, upscale: int) -> None:
        """Writes a turn's video.

        Args:
            turn: its number.
            shot: uint8 (F, H, W, 3).
            upscale: how many times larger than drawn.

        Raises:
            ConfigError: if ``upscale`` is not positive.
            OSError: disk full and the like.
        """
        if upscale < 1:
            raise ConfigError(f"play.upscale is {upscale}, expected 1 (as drawn) or more")
        large = resize(shot, shot.shape[1] * upscale, shot.shape[2] * upscale)
        write_video(self.folder / shot_file(turn), large, self.settings["fps"])

    @property
    def scopes(self) -> list[MotionScope]:
        """Motion scope of every turn."""
        return [turn.motion_scope for turn in self.turns]

    @property
    def rules(self) -> MeterRules:
        """The meter rules it was played by."""
        return MeterRules(**self.settings["meters"])

    @property
    def seeds(self) -> list[tuple[int, int]]:
        """What each shot's noise is made of: the game's seed and the turn."""
        return [(self.settings["seed"], turn) for turn in range(1, len(self.turns) + 1)]

    def write(self) -> None:
        """Writes the files, each whole or not at all; without a turn, nothing.

        Videos that an earlier, longer game left behind the last turn are deleted.

        Raises:
            OSError: disk full and the like.
        """
        if not self.turns:
            return
        for old in self.folder.glob("turn_*.mp4"):
            number = old.stem.removeprefix("turn_")
            if number.isdecimal() and int(number) > len(self.turns):
                old.unlink()
        # safetensors writes memory as it lies: a transposed view would be stored scrambled.
        tensors = {
            turn_key(turn): np.ascontiguousarray(s_a) for turn, s_a in enumerate(self.s_a_hat, 1)
        }
        write_bytes(self.folder / STATES_FILE, save_tensors(tensors, {"format": FORMAT}))
        if self.opening_frame is not None:
            picture = io.BytesIO()
            Image.fromarray(self.opening_frame).save(picture, "PNG")
            write_bytes(self.folder / OPENING_FILE, picture.getvalue())
        tree = {
            "format": FORMAT,
            "version": VERSION,
            "animegamer": __version__,
            "name": self.name,
            "settings": self.settings,
            "opening": self.opening and {"source": self.opening, "picture": OPENING_FILE},
            "turns": [_turn_to_json(number, turn) for number, turn in enumerate(self.turns, 1)],
        }
        write_text(self.folder / GAME_FILE, json.dumps(tree, ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> SavedGame:
        """Reads the files.

        Raises:
            SavedGameError: if one is damaged, or they do not belong together.
            FileNotFoundError: if there is no saved game in the folder.
        """
        path, states = Path(folder) / GAME_FILE, Path(folder) / STATES_FILE
        for file in (path, states):
            if not file.is_file():
                raise FileNotFoundError(f"no {file}: play the game first (inference_MLLM.py)")
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree["format"] != FORMAT or tree["version"] != VERSION:
                raise SavedGameError(f"{tree['format']!r} version {tree['version']!r}")
            opening = tree["opening"] and tree["opening"]["source"]
            turns = [_turn_from_json(turn) for turn in tree["turns"]]
            game = cls(path.parent, tree["name"], tree["settings"], opening, turns=turns)
            _ = game.rules, game.seeds, game.settings["fps"], game.settings["history"]
            if opening is not None:
                with Image.open(path.parent / tree["opening"]["picture"]) as picture:
                    game.opening_frame = np.asarray(picture.convert("RGB"))
        except (ValueError, KeyError, TypeError, AttributeError, UnidentifiedImageError) as error:
            raise SavedGameError(
                f"{path}: cannot be read ({type(error).__name__}: {error}); expected {FORMAT!r} "
                f"version {VERSION}"
            ) from None
        try:
            tensors = load_tensors(states.read_bytes())
            game.s_a_hat = [tensors[turn_key(turn)] for turn in range(1, len(turns) + 1)]
        except (SafetensorError, KeyError) as error:
            raise SavedGameError(
                f"{states}: cannot be read ({error}); expected turn_01 to "
                f"{turn_key(len(turns))}: play the game again"
            ) from None
        return game


def shot_file(turn: int) -> str:
    """Name of a turn's video: ``turn_01.mp4``."""
    return f"{turn_key(turn)}.mp4"


def folders(output: str | Path, scripts: Sequence[str | Path]) -> list[Path]:
    """Where each script's game lies: the output itself, or one folder each when several."""
    if len(scripts) == 1:
        return [Path(output)]
    names: list[str] = []
    for script in scripts:
        stem = name = Path(script).stem
        number = 1
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names.append(name)
    return [Path(output) / name for name in names]


def _turn_to_json(number: int, turn: SavedTurn) -> dict[str, Any]:
    return {
        "turn": number,
        "instruction": asdict(turn.instruction),
        "motion_scope": {"level": turn.motion_scope.level, "scalar": turn.motion_scope.scalar},
        "change": turn.change.as_dict(),
        "meters": turn.meters,
        "files": {
            "s_a_hat": {"file": STATES_FILE, "key": turn_key(number)},
            "shot": shot_file(number),
        },
    }


def _turn_from_json(tree: dict[str, Any]) -> SavedTurn:
    asked = tree["instruction"]
    instruction = Instruction(tuple(asked["characters"]), asked["motion"], asked["background"])
    return SavedTurn(
        instruction,
        MotionScope(tree["motion_scope"]["level"]),
        CharacterState(**tree["change"]),
        tree["meters"],
    )
