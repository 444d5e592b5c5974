"""The held-out games: which kinds there are, how many, and which of their turns are judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from animegamer.config import EvaluateConfig
from animegamer.evaluation.truth import TruthError
from animegamer.records import Episode, Shot, read_episodes

LANGUAGES = 3
LONG_FIRST = range(1, 11)
LONG_LAST = range(91, 101)


@dataclass(frozen=True)
class GameSet:
    """Held-out games of one kind.

    Attributes:
        name: of the set; also of its folder in the results.
        directory: where the ``shots.jsonl`` is that they came from.
        episodes: the games, in file order, read with hidden attributes.
        window: turns in view, None for the session's own.
        judged: turns that are drawn and judged, None for all; the others are played without
            pictures where nothing looks at them.
    """

    name: str
    directory: Path
    episodes: tuple[Episode, ...]
    window: int | None = None
    judged: frozenset[int] | None = None

    def shots(self) -> list[Shot]:
        """What is judged, game by game: never an opening."""
        return [shot for episode in self.episodes for shot in episode.shots if self.wants(shot)]

    def wants(self, shot: Shot) -> bool:
        """Whether a shot is judged."""
        return shot.turn > 0 and (self.judged is None or shot.turn in self.judged)

    def turns(self) -> int:
        """Turns that are played, judged or not."""
        return sum(shot.turn > 0 for episode in self.episodes for shot in episode.shots)


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
    if not sets:
        raise TruthError("evaluate.count and the other numbers of games are all 0")
    return sets
