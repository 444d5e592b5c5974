"""Playing: ``GameSession.load(config).step(instruction)``, the one way a game is played.

``GameSession`` holds the loaded models and no game but its own first one; a ``Game`` is what one
player has done so far, small, copyable, without any network. Nothing is kept in the process.

Axis letters: B games, F frames, H x W pixels, N tokens of s_a, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from animegamer.config import Config, ConfigError
from animegamer.drawing import ShotDrawer, ShotReader, load_part, precision, with_checkpoint
from animegamer.game import GameState, History, Instruction, Meters, Turn
from animegamer.opening import read_opening
from animegamer.placement import placement
from animegamer.vocabulary import Vocabulary


@dataclass
class Game:
    """What one player has done so far.

    Attributes:
        history: past turns, as far as a later turn can see them; no frames in it.
        meters: stamina, social and entertainment of every character met.
        seed: of the shots' noise, together with the turn number.
        turn: turns played; turn 0, the opening, is none.
    """

    history: History
    meters: Meters = field(default_factory=Meters)
    seed: int = 0
    turn: int = 0

    def snapshot(self) -> Game:
        """A copy that later turns of this game leave as it is. Cheap: arrays are shared."""
        history = History(self.history.window, self.history.sink, list(self.history.turns))
        meters = {name: dict(values) for name, values in self.meters.values.items()}
        return Game(history, Meters(self.meters.rules, meters), self.seed, self.turn)

    def restore(self, snapshot: Game) -> None:
        """Goes back to a snapshot, which can be used again."""
        copy = snapshot.snapshot()
        self.history, self.meters = copy.history, copy.meters
        self.seed, self.turn = copy.seed, copy.turn

    def spelling(self, character: str, vocabulary: Vocabulary) -> str:
        """The name under which this game keeps a character's meters: its first spelling."""
        key = vocabulary.character(character)
        for known in self.meters.values:
            if vocabulary.character(known) == key:
                return known
        return character


class GameSession:
    """Loaded models, and a game to play with them.

    Args:
        config: resolved configuration, its model part as the checkpoint has it.
        mllm: predicts the next game state (``animegamer.models.mllm.NextStateMLLM``).
        drawer: draws shots, or None where only states are wanted.
        reader: makes ``s_a`` of pictures; called when one is first needed.
        vocabulary: the names that the checkpoint was trained on.

    Raises:
        ConfigError: if the settings need shots and no drawer is given.
    """

    def __init__(
        self,
        config: Config,
        mllm: Any,
        drawer: ShotDrawer | None,
        reader: Callable[[], ShotReader],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if config.play.history == "reencoded" and drawer is None:
            raise ConfigError(
                "play.history is reencoded, which looks at the drawn shots, but nothing is drawn: "
                "load the session with draw=True, or set play.history=predicted"
            )
        self.config = config
        self.mllm = mllm
        self.drawer = drawer
        self.vocabulary = vocabulary or Vocabulary()
        self._make_reader = reader
        self._reader: ShotReader | None = None
        self.game = self.new_game()

    @classmethod
    def load(cls, config: Config, draw: bool = True) -> GameSession:
        """Loads what playing needs from ``config.play.checkpoint``.

        Args:
            config: its ``play`` and ``sampling`` count; the model part is the checkpoint's own.
            draw: load decoder and autoencoder too, so that turns come with their shots.

        Raises:
            CheckpointError: if the checkpoint, or a part of it, is missing or cannot be read.
            ConfigError: if the settings need shots and ``draw`` is off.
        """
        config = with_checkpoint(config)
        play = config.play
        if play.history == "reencoded" and not draw:
            raise ConfigError("play.history=reencoded looks at the drawn shots: it needs draw=True")
        if play.threads:
            torch.set_num_threads(play.threads)
        vocabulary = Vocabulary.read(Path(play.checkpoint) / "vocabulary.json")

        def load_mllm(directory: Path) -> Any:
            from animegamer.models.mllm import NextStateMLLM

            # LoRA stands on a base, which lies where the checkpoint says, or beside it.
            base = Path(config.backbones.language_base)
            return NextStateMLLM.from_pretrained(
                directory,
                base=base if base.is_dir() else None,
                dtype=precision(config, "mllm"),
                weights=play.memory.mllm_weights,
                device=place.device,
            )

        place = placement(play, "mllm")
        mllm = load_part(Path(play.checkpoint) / "mllm", load_mllm, place)
        drawer = ShotDrawer.load(config) if draw else None
        return cls(config, mllm, drawer, lambda: ShotReader.load(config), vocabulary)

    @property
    def meters(self) -> Meters:
        """Meters of the session's own game."""
        return self.game.meters

    def new_game(self, opening: str | Path | np.ndarray | None = None) -> Game:
        """Starts another game with these models.

        Args:
            opening: picture or shot of turn 0, as in ``open``.
        """
        play = self.config.play
        game = Game(History(play.window, play.sink), Meters(play.meters), play.seed)
        if opening is not None:
            self.open(opening, game)
        return game

    def meters_of(self, game: Game, instruction: Instruction) -> dict[str, dict[str, int]]:
        """The meters of the named characters, by the names under which the game keeps them."""
        names = [game.spelling(name, self.vocabulary) for name in instruction.characters]
        return {name: dict(game.meters.values[name]) for name in names}

    def restart(self, opening: str | Path | np.ndarray | None = None) -> None:
        """Replaces the session's own game by a new one; nothing of the old one is left."""
        self.game = self.new_game(opening)

    def open(self, opening: str | Path | np.ndarray, game: Game | None = None) -> GameState:
        """Sets turn 0: what the game world looks like before anything is asked for.

        Args:
            opening: picture (png, jpg), video, or uint8 frames (H, W, 3) or (F, H, W, 3). It is
                scaled and cropped to the shot's size, never squashed; ``f_v`` is its first frame
                and the action text is empty.
            game: the game to open, or None for the session's own.

        Returns:
            The state of turn 0: ``s_a`` and the fitted frames.

        Raises:
            ValueError: if the game has already begun.
            OpeningError: if the file is neither picture nor video, or the frames are no frames.
            FileNotFoundError: if there is no such file.
        """
        game = self.game if game is None else game
        if game.turn or game.history.turns:
            raise ValueError(
                f"the game is at turn {game.turn} and has its opening: an opening comes first"
            )
        frames = read_opening(opening, self.config.shot)
        state = GameState(None, None, self._read_shots(frames[None, 0], [""])[0])
        game.history.append(Turn(None, state))
        return replace(state, shot=frames)

    def step(self, instruction: Instruction) -> GameState:
        """Plays one turn of the session's own game (see ``step_batch``)."""
        return self.step_batch([self.game], [instruction])[0]

    def step_batch(
        self, games: Sequence[Game], instructions: Sequence[Instruction]
    ) -> list[GameState]:
        """Plays one turn in each of several games (paper Sec. 3.2: next game state prediction).

        A game's outcome does not depend on the others in the batch. If anything fails, every game
        is as it was before.

        Args:
            games: the games, each at most once.
            instructions: one for each.

        Returns:
            Per game: motion scope, state change, ``s_a`` (the prediction, float32 (N, D)), and the
            shot, uint8 (F, H, W, 3), or None without a drawer.

        Raises:
            ValueError: if the numbers of games and instructions differ, or a game is given twice.
            FloatingPointError: if a model answers with numbers that are not finite.
        """
        if len(games) != len(instructions) or len({id(game) for game in games}) != len(games):
            raise ValueError(
                f"{len(games)} games and {len(instructions)} instructions: expected one "
                "instruction for each game, and each game once"
            )
        if not games:
            return []
        with torch.no_grad(), placement(self.config.play, "mllm").working(self.mllm):
            prediction = self.mllm.predict(
                [game.history.visible() for game in games], list(instructions)
            )
        s_a_hat = torch.as_tensor(prediction.s_a_hat).detach().float().cpu().numpy()
        if not np.isfinite(s_a_hat).all():
            raise FloatingPointError("the MLLM predicts an s_a_hat that is not finite")
        states = [
            GameState(scope, change, s_a)
            for scope, change, s_a in zip(
                prediction.motion_scopes, prediction.changes, s_a_hat, strict=True
            )
        ]
        if self.drawer is not None:
            scopes = [state.motion_scope for state in states]
            seeds = [(game.seed, game.turn + 1) for game in games]
            shots = self.drawer.draw(s_a_hat, scopes, seeds)
            states = [replace(state, shot=shot) for state, shot in zip(states, shots, strict=True)]
        remembered = self._remembered(states, instructions)
        for game, instruction, state in zip(games, instructions, remembered, strict=True):
            names = [game.spelling(name, self.vocabulary) for name in instruction.characters]
            game.meters.apply(dict.fromkeys(names), state.change)
            game.history.append(Turn(instruction, state))
            game.turn += 1
        return states

    def play(
        self, games: Sequence[Game], instructions: Sequence[Sequence[Instruction]]
    ) -> Iterator[tuple[int, Instruction, GameState]]:
        """Plays several games turn by turn as one batch, each as far as its instructions go.

        Args:
            games: the games.
            instructions: all instructions of each.

        Yields:
            After each turn of each game: the game's index, the instruction, the new state.

        Raises:
            InstructionError: before the first turn, if an instruction is too long for the model or
                holds one of its reserved words.
        """
        for instruction in chain.from_iterable(instructions):
            self.mllm.language.text_ids(instruction)
        for turn in range(max(map(len, instructions), default=0)):
            playing = [i for i, asked in enumerate(instructions) if turn < len(asked)]
            asked = [instructions[i][turn] for i in playing]
            yield from zip(
                playing, asked, self.step_batch([games[i] for i in playing], asked), strict=True
            )

    def _remembered(
        self, states: Sequence[GameState], instructions: Sequence[Instruction]
    ) -> list[GameState]:
        """The states as later turns see them, without frames.

        Assumed: for a re-encoded past, the action text is the player's own motion text; nobody
        captions a shot that has just been drawn. The encoder was trained on the action texts of
        the data, which say the same in the words of the annotation.
        """
        if self.config.play.history == "predicted":
            return [replace(state, shot=None) for state in states]
        frames = np.stack([state.shot[0] for state in states])
        s_a = self._read_shots(frames, [instruction.motion for instruction in instructions])
        return [
            replace(state, s_a=each, shot=None) for state, each in zip(states, s_a, strict=True)
        ]

    def _read_shots(self, frames: np.ndarray, texts: list[str]) -> np.ndarray:
        if self._reader is None:
            self._reader = self._make_reader()
        return self._reader.read(frames, texts)
