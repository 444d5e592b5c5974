"""One evaluation from end to end: which games, played, judged, and all of it stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from animegamer.checkpoint import fingerprint
from animegamer.config import Config
from animegamer.evaluation.benchmark import SetResult
from animegamer.evaluation.games import GameSet
from animegamer.evaluation.judge import (
    Judged,
    judge_drawn,
    judge_played,
    kept,
    outcomes,
    probe_accuracy,
)
from animegamer.evaluation.play import PlayedSet, Session, identity, play_set
from animegamer.evaluation.probes import Probe

CEILINGS = ("standard", "skill")
"""Sets whose drawn shots are judged too."""


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
