"""Held-out games played through a GameSession, side by side, and kept on disk set by set.

A finished set is used again only if checkpoint, settings and games are the same. The generated
shots are stored as they came, uint8, so that nothing but the game is judged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from animegamer.atomic import write_text
from animegamer.config import Config
from animegamer.evaluation.games import GameSet
from animegamer.evaluation.truth import game_name, has_opening
from animegamer.game import CharacterState, GameState, History, Instruction, MotionScope
from animegamer.records import Episode, Shot, to_json

_SAMPLING = ("steps", "guidance", "scale", "exponent", "stochastic")
_PLAY = ("window", "sink", "history", "seed")


class Session(Protocol):
    """The part of ``animegamer.session.GameSession`` that evaluation plays with."""

    config: Config
    drawer: Any

    def new_game(self, opening: Any = None) -> Any:
        """Starts a game."""

    def step_batch(self, games: Sequence[Any], instructions: Sequence[Instruction]) -> list[Any]:
        """Plays one turn of each game."""


@dataclass(frozen=True)
class PlayedSet:
    """What the games gave, in the order of ``GameSet.shots()``.

    Attributes:
        states: level and change of each turn, None where the game failed; no frames in them.
        frames: uint8 (n, F, H, W, 3), lazily read; zeros where the game failed.
        seconds: mean time of a turn, drawn and played side by side, without loading.
    """

    states: list[GameState | None]
    frames: np.ndarray
    seconds: float


def identity(config: Config, checkpoint: str, games: GameSet) -> dict[str, Any]:
    """What a stored set must agree in to be used again.

    Args:
        config: the session's.
        checkpoint: fingerprint of the checkpoint's weights.
        games: the set.
    """
    text = "\n".join(to_json(shot) for episode in games.episodes for shot in episode.shots)
    play = {name: getattr(config.play, name) for name in _PLAY}
    if games.window is not None:
        play["window"] = games.window
    judged = sorted(games.judged) if games.judged is not None else "all"
    return {
        "checkpoint": checkpoint,
        "judged": judged,
        "games": hashlib.sha256(text.encode()).hexdigest()[:16],
        "play": play,
        "sampling": {name: getattr(config.sampling, name) for name in _SAMPLING},
    }


def load_set(directory: str | Path, key: dict[str, Any]) -> PlayedSet | None:
    """A set played earlier, or None if it is absent, unfinished or of something else."""
    directory = Path(directory)
    done = directory / "turns.json"
    if not done.is_file():
        return None
    stored = json.loads(done.read_text(encoding="utf-8"))
    if stored["key"] != key:
        return None
    states = [None if turn is None else _state(turn) for turn in stored["turns"]]
    frames = np.load(directory / "shots.npy", mmap_mode="r", allow_pickle=False)
    return PlayedSet(states, frames, stored["seconds"])


def play_set(
    session: Session, games: GameSet, directory: str | Path, key: dict[str, Any]
) -> PlayedSet:
    """Plays all games of a set side by side, one turn of each at a time.

    Where a batch fails with numbers that are not finite, its games are tried alone, and the one at
    fault ends there: its remaining turns count as wrong.

    Args:
        session: loaded models.
        games: the set.
        directory: gets ``shots.npy`` and, last of all, ``turns.json``.
        key: from ``identity``.

    Returns:
        The stored set; it is the earlier one if that has the same key.
    """
    directory = Path(directory)
    stored = load_set(directory, key)
    if stored is not None:
        return stored
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shots = games.shots()
    shape = session.config.shot
    frames = np.lib.format.open_memmap(
        directory / "shots.npy",
        "w+",
        np.uint8,
        (len(shots), shape.frames, shape.height, shape.width, 3),
    )
    states, seconds = _play_turns(session, games, frames)
    frames.flush()
    turns = [None if state is None else _turn(state) for state in states]
    text = json.dumps({"key": key, "seconds": seconds, "turns": turns}, indent=1)
    write_text(directory / "turns.json", text)
    return PlayedSet(states, frames, seconds)


def _play_turns(
    session: Session, games: GameSet, frames: np.ndarray
) -> tuple[list[GameState | None], float]:
    """Fills ``frames``; returns the states and the mean seconds of a drawn turn."""
    row_of = {shot.shot_id: row for row, shot in enumerate(games.shots())}
    states: list[GameState | None] = [None] * len(row_of)
    running = [(start_game(session, games, episode), episode) for episode in games.episodes]
    seconds = 0.0
    with tqdm(total=games.turns(), desc=f"playing {games.name}", unit="turn") as progress:
        for turn in range(1, 1 + max(episode.shots[-1].turn for episode in games.episodes)):
            asked = [
                (game, shot)
                for game, episode in running
                for shot in episode.shots
                if shot.turn == turn
            ]
            drawn = any(games.wants(shot) for _, shot in asked)
            started = time.monotonic()
            results = _step(session, [g for g, _ in asked], [s for _, s in asked], drawn)
            seconds += (time.monotonic() - started) * drawn
            failed = set()
            for (_, shot), state in zip(asked, results, strict=True):
                if state is None:
                    failed.add(shot.episode)
                elif games.wants(shot):
                    row = row_of[shot.shot_id]
                    frames[row] = state.shot
                    states[row] = GameState(state.motion_scope, state.change)
            running = [(g, e) for g, e in running if e.episode not in failed]
            progress.update(len(asked))
    return states, seconds / max(1, len(states))


def start_game(session: Session, games: GameSet, episode: Episode) -> Any:
    """A game at its opening, with noise of its own and the set's window."""
    opening = games.directory / episode.shots[0].clip if has_opening(episode) else None
    window = games.window
    game = session.new_game(opening)
    game.seed = session.config.play.seed + zlib.crc32(game_name(episode.shots[-1]).encode())
    if window is not None:
        game.history = History(window, 0 if window == 1 else game.history.sink, game.history.turns)
    return game


def seconds_alone(session: Session, games: GameSet, turns: int = 3) -> float:
    """Seconds a turn for one player alone, the first turn of the first game not counted."""
    episode = max(games.episodes, key=lambda e: len(e.shots))
    game = start_game(session, games, episode)
    asked = [shot.instruction for shot in episode.shots if shot.instruction is not None]
    times = []
    for instruction in asked[: turns + 1]:
        started = time.monotonic()
        session.step_batch([game], [instruction])
        times.append(time.monotonic() - started)
    return float(np.mean(times[1:] or times))


def _step(
    session: Session, games: list[Any], shots: list[Shot], drawn: bool
) -> list[GameState | None]:
    asked = [shot.instruction for shot in shots if shot.instruction is not None]
    drawer = session.drawer
    try:
        if not drawn and session.config.play.history == "predicted":
            session.drawer = None
        return list(session.step_batch(games, asked))
    except FloatingPointError:
        if len(games) == 1:
            return [None]
    finally:
        session.drawer = drawer
    return [
        state
        for game, shot in zip(games, shots, strict=True)
        for state in _step(session, [game], [shot], drawn)
    ]


def _turn(state: GameState) -> dict[str, Any]:
    assert state.motion_scope is not None and state.change is not None
    return {"level": state.motion_scope.level, "change": state.change.as_dict()}


def _state(turn: dict[str, Any]) -> GameState:
    return GameState(MotionScope(turn["level"]), CharacterState(**turn["change"]))
