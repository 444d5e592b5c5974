"""A stand-in world: coloured rectangles instead of characters, and a session that draws them."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from animegamer.config import Config, PlayConfig, ShotConfig
from animegamer.game import CharacterState, GameState, History, Instruction, MotionScope, Turn
from animegamer.records import Shot, write_jsonl
from animegamer.video import write_video

CHARACTERS = ("Ada", "Bo", "Cy")
MOTIONS = ("walk", "sit", "fly")
PLACES = ("field", "room")
TIMES = ("day", "night")
SCARVES = ("none", "red", "blue")
LANDMARKS = ("none", "tower")
FRAMES, HEIGHT, WIDTH = 17, 32, 64
SHOT = ShotConfig(FRAMES, 8, HEIGHT, WIDTH)
_COLORS = {
    "Ada": (220, 40, 40),
    "Bo": (40, 200, 60),
    "Cy": (60, 80, 230),
    "none": (128, 128, 128),
    "red": (250, 0, 0),
    "blue": (0, 0, 250),
    "field": (150, 230, 140),
    "room": (240, 200, 150),
}


def paint(labels: dict[str, Any], hidden: dict[str, Any]) -> np.ndarray:
    """uint8 (17, 32, 64, 3): everything that the labels say can be seen."""
    video = np.empty((FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    video[:] = _COLORS[labels["place"]]
    if labels["time_of_day"] == "night":
        video //= 3
    if hidden["landmark"] == "tower":
        video[:, 2:10, 52:62] = 255
    speed = {"stand": 0, "walk": 3, "sit": 0, "fly": 1}[labels["motion"]]
    for place, name in enumerate(labels["characters"]):
        column = 8 + 20 * place
        for frame in range(FRAMES):
            top = 8 + speed * (frame % 3)
            tall = 10 if labels["motion"] == "sit" else 14
            video[frame, top : top + tall, column : column + 12] = _COLORS[name]
            scarf = hidden["scarves"].get(name, "none")
            video[frame, top + 4 : top + 8, column : column + 12] = _COLORS[scarf]
    if labels["motion"] == "fly":
        video[:, 26:31] = _COLORS[hidden["vehicle"]]
    return video


def make_shot(
    episode: str, turn: int, rng: np.random.Generator, hidden: dict[str, Any], **changes: Any
) -> Shot:
    """A shot of a stand-in game with random labels."""
    count = 1 + int(rng.random() < 0.4)
    labels = {
        "characters": [str(c) for c in rng.permutation(CHARACTERS)[:count]],
        "motion": "stand" if turn == 0 else str(rng.choice(MOTIONS)),
        "place": str(rng.choice(PLACES)),
        "time_of_day": str(rng.choice(TIMES)),
    }
    labels.update(changes)
    level = 1 + MOTIONS.index(labels["motion"]) if turn else 1
    instruction = Instruction(
        tuple(labels["characters"]), labels["motion"], f"{labels['time_of_day']} {labels['place']}"
    )
    return Shot(
        shot_id=f"{episode}-t{turn:03d}",
        film="A",
        split="test",
        episode=episode,
        turn=turn,
        clip=f"clips/{episode}-t{turn:03d}.mp4",
        instruction=instruction if turn else None,
        action="",
        motion_scope=1.0,
        motion_level=level,
        change=CharacterState(turn % 3, 0, -1) if turn else None,
        labels=labels,
        hidden=hidden,
    )


def make_game(episode: str, turns: int, seed: int = 0) -> list[Shot]:
    """An opening and some turns."""
    rng = np.random.default_rng([seed, zlib.crc32(episode.encode())])
    scarves = {name: str(rng.choice(SCARVES)) for name in CHARACTERS}
    hidden = {
        "scarves": scarves,
        "vehicle": str(rng.choice(SCARVES)),
        "landmark": str(rng.choice(LANDMARKS)),
    }
    return [make_shot(episode, turn, rng, hidden) for turn in range(turns + 1)]


def write_games(directory: Path, games: int, turns: int, seed: int = 0) -> list[Shot]:
    """Writes clips, records and ``world.json`` of stand-in games."""
    shots = [s for g in range(games) for s in make_game(f"test-standard-{g:03d}", turns, seed)]
    for shot in shots:
        write_video(directory / shot.clip, paint(shot.labels, shot.hidden), 8, 5, "yuv444p")
    write_jsonl(directory / "shots.jsonl", shots)
    facts = {
        "level_edges": [1.0, 4.0, 9.0, 20.0],
        "films": {"Ada": "A", "Bo": "A", "Cy": "B"},
        "skills": {"fly": ["Ada"]},
    }
    (directory / "world.json").write_text(json.dumps(facts))
    return shots


class FakeSession:
    """Answers like a perfect ``GameSession``, or fails on the turns it is told to."""

    def __init__(self, shots: list[Shot], config: Config | None = None) -> None:
        self.config = config or Config(shot=SHOT, play=PlayConfig(window=3))
        self.by_instruction = {(s.episode, s.turn): s for s in shots}
        self.drawer: Any = SimpleNamespace(autoencoder=Identity())
        self.opened: list[Any] = []
        self.drawn = self.stepped = 0
        self.fail: set[tuple[str, int]] = set()

    def new_game(self, opening: Any = None) -> Any:
        self.opened.append(opening)
        play = self.config.play
        game = SimpleNamespace(
            history=History(play.window, play.sink),
            seed=0,
            turn=0,
            episode=Path(opening).stem.rsplit("-t", 1)[0],
        )
        if opening is not None:
            game.history.append(Turn(None, GameState(None, None)))
        return game

    def picture(self, shot: Shot) -> np.ndarray:
        return paint(shot.labels, shot.hidden)

    def step_batch(self, games: Any, instructions: Any) -> list[GameState]:
        keys = [(game.episode, game.turn + 1) for game in games]
        if self.fail & set(keys):
            raise FloatingPointError("not finite")
        states = []
        for game, key, asked in zip(games, keys, instructions, strict=True):
            shot = self.by_instruction[key]
            assert shot.instruction == asked
            picture = None
            if self.drawer is not None:
                picture = self.picture(shot)
                self.drawn += 1
            state = GameState(MotionScope(shot.motion_level), shot.change, None, picture)
            game.history.append(Turn(asked, replace(state, shot=None)))
            game.turn += 1
            self.stepped += 1
            states.append(state)
        return states


class Identity:
    """A first stage that loses nothing."""

    def encode(self, video: Any) -> Any:
        return video

    def decode(self, video: Any) -> Any:
        return video
