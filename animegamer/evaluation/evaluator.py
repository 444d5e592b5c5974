"""One evaluation from end to end: which games, played, judged, and all of it stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from animegamer.checkpoint import fingerprint
from animegamer.config import Config, EvaluateConfig
from animegamer.evaluation.benchmark import LONG_FIRST, LONG_LAST, SetResult
from animegamer.evaluation.judge import (
    Judged,
    judge_drawn,
    judge_played,
    kept,
    outcomes,
    probe_accuracy,
)
from animegamer.evaluation.play import GameSet, PlayedSet, Session, identity, play_set
from animegamer.evaluation.probes import Probe
from animegamer.evaluation.truth import TruthError
from animegamer.records import read_episodes

LANGUAGES = 3
CEILINGS = ("standard", "skill")
"""Sets whose drawn shots are judged too."""


def games_wanted(evaluate: EvaluateConfig) -> dict[str, int]:
    """Kind of game to how many of them the world has to draw."""
    wanted = {
        "standard": max(evaluate.count, evaluate.window_games),
        "skill": evaluate.skill_games,
        "language": LANGUAGES * evaluate.language_games,
        "long": evaluate.long_games,
    }
    return {kind: count for kind, count in wanted.items() if count > 0}


def game_sets(evaluate: EvaluateConfig) -> dict[str, GameSet]:
    """The sets to play, from ``evaluate.games``; the first games of each file.

    Raises:
        TruthError: if fewer games were drawn than are wanted.
    """
    sets = {}
    for kind, count in games_wanted(evaluate).items():
        directory = Path(evaluate.games) / kind
        episodes = read_episodes(directory / "shots.jsonl", hidden=True)
        if kind == "language":  # by game, so that the first ones have all their languages
            episodes.sort(key=lambda episode: episode.episode)
        if len(episodes) < count:
            raise TruthError(f"{directory} holds {len(episodes)} games, expected {count} or more")
        if kind == "standard" and evaluate.window_games > 0:
            sets["window_1"] = GameSet(
                "window_1", directory, tuple(episodes[: evaluate.window_games]), window=1
            )
            count = evaluate.count
        judged = frozenset([*LONG_FIRST, *LONG_LAST]) if kind == "long" else None
        if count > 0:
            sets[kind] = GameSet(kind, directory, tuple(episodes[:count]), judged=judged)
    return sets


def weights(checkpoint: str | Path) -> str:
    """Fingerprint of everything in a checkpoint that changes a game."""
    parts = ("backbones", "encoder", "decoder", "mllm")
    found = [Path(checkpoint) / part for part in parts if (Path(checkpoint) / part).is_dir()]
    return _digest([fingerprint(path) for path in found])


class Evaluator:
    """Plays and judges sets, and keeps what it has done under ``evaluate.output``.

    Args:
        config: resolved configuration.
        session: loaded models (``GameSession``).
        probe: the classifier.
        edges: the world's borders between motion levels.
        checkpoint: fingerprint of the weights.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        probe: Probe,
        edges: tuple[float, ...],
        checkpoint: str,
    ) -> None:
        self.config, self.session, self.probe, self.edges = config, session, probe, edges
        self.checkpoint = checkpoint
        self.output = Path(config.evaluate.output)
        probe_file = Path(config.evaluate.probes) / "probe.safetensors"
        self._eyes = _digest([fingerprint(probe_file), list(edges)])
        self.accuracy: dict[str, dict[str, float]] = {}

    def evaluate(self, games: GameSet) -> tuple[SetResult, PlayedSet]:
        """Plays a set, or takes it from an earlier run, and judges it.

        Returns:
            What was judged, and the generated shots.
        """
        folder = self.output / games.name
        key = identity(self.config, self.checkpoint, games)
        played = play_set(self.session, games, folder, key)
        (judged,) = kept(
            folder / "judged.json",
            _digest([key, self._eyes]),
            lambda: [judge_played(self.probe, self.edges, played)],
        )
        drawn = Judged([], [], [])
        if games.name in CEILINGS:
            drawn = self._ceiling(games, key["games"])
        result = SetResult(
            games=games,
            given=outcomes(games, judged),
            drawn=outcomes(games, drawn) if drawn.readings else [],
            sharpness=(judged.energies, drawn.energies),
            psnrs=drawn.psnrs,
        )
        return result, played

    def _ceiling(self, games: GameSet, content: str) -> Judged:
        autoencoder = self.session.drawer.autoencoder
        device = self.config.play.device

        def through(video: Any) -> Any:
            return autoencoder.decode(autoencoder.encode(video.to(device)))

        first_stage = fingerprint(self.config.backbones.autoencoder)
        plain, restored = kept(
            self.output / games.name / "drawn.json",
            _digest([content, first_stage, self._eyes]),
            lambda: list(judge_drawn(self.probe, self.edges, games, through)),
        )
        if games.name == "standard":
            self.accuracy = {
                "drawn": probe_accuracy(games.shots(), plain),
                "reconstructed": probe_accuracy(games.shots(), restored),
            }
        return restored


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
