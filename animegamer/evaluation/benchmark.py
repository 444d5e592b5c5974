"""The named figures of the report, from judged sets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from animegamer.evaluation import metrics
from animegamer.evaluation.games import LONG_FIRST, LONG_LAST, GameSet
from animegamer.evaluation.metrics import NOTHING, Figure, Score, with_ceiling, with_chance
from animegamer.evaluation.truth import Outcome, World
from animegamer.game import STATE_NAMES

_SHOWN: tuple[tuple[str, Score, Callable[[Outcome], Hashable]], ...] = (
    ("character", metrics.right_characters, lambda o: o.truth.characters),
    ("motion", metrics.right_motion, lambda o: o.truth.motion),
    ("background", metrics.right_background, lambda o: o.truth.place),
    ("time_of_day", metrics.right_time, lambda o: o.truth.time_of_day),
    ("acc_f", metrics.right_level, lambda o: o.truth.level),
)


@dataclass(frozen=True)
class SetResult:
    """A set that was played and judged.

    Attributes:
        games: the set.
        given: turn by turn, the generated shots.
        drawn: the same turns as the drawn shots, after the first stage; empty if not judged.
        sharpness: gradient energies of generated and of reconstructed drawn shots.
        psnrs: dB of the first stage on the drawn shots.
    """

    games: GameSet
    given: list[Outcome]
    drawn: list[Outcome]
    sharpness: tuple[list[float], list[float]]
    psnrs: list[float]


def figures(
    results: dict[str, SetResult], world: World, window: int, resamples: int
) -> dict[str, Figure]:
    """All figures of the report, in its order.

    Args:
        results: by set name: ``standard``, ``window_1`` (the same games without history),
            ``skill``, ``language``, ``long``; an absent set leaves its figures empty.
        world: films and skills.
        window: turns in view in all sets but ``window_1``.
        resamples: bootstrap draws.

    Returns:
        Figure by name; one that nothing could be measured for has value None and n 0.
    """
    found: dict[str, Figure] = {}
    standard = results.get("standard")
    given = standard.given if standard else []
    drawn = standard.drawn if standard else []
    found.update(_states(given, resamples))
    for name, score, answer in _SHOWN:
        found[name] = _share(given, drawn, score, resamples, answer)
    found["mae_f"] = _level_error(given, drawn, resamples)
    found["acc_f_predicted"] = metrics.share(given, metrics.right_predicted_level, resamples)
    found.update(_hidden(results, window, resamples))
    if standard is not None:
        marks = [world.across_films(shot) for shot in standard.games.shots()]
        apart = [o for o, mark in zip(given, marks, strict=True) if mark]
        ceiling = [o for o, mark in zip(drawn, marks, strict=False) if mark]
        found["cross_film"] = _share(
            apart, ceiling, metrics.right_characters, resamples, lambda o: o.truth.characters
        )
    found["language_change"] = _language(results.get("language"), resamples)
    skill = results.get("skill")
    unseen = _unseen(skill.given, skill, world) if skill else []
    ceiling = _unseen(skill.drawn, skill, world) if skill else []
    found["unseen_character"] = _share(
        unseen, ceiling, metrics.right_characters, resamples, lambda o: o.truth.characters
    )
    found["unseen_motion"] = _share(
        unseen, ceiling, metrics.right_motion, resamples, lambda o: o.truth.motion
    )
    found["long_game_change"] = _long(results.get("long"), resamples)
    found.update(_pictures(standard, resamples))
    return found


def _share(
    given: Sequence[Outcome],
    drawn: Sequence[Outcome],
    score: Score,
    resamples: int,
    answer: Callable[[Outcome], Hashable],
) -> Figure:
    figure = metrics.share(given, score, resamples)
    ceiling = metrics.share(drawn, score, 1).value
    return with_ceiling(with_chance(figure, metrics.commonest(map(answer, given))), ceiling)


def _states(given: Sequence[Outcome], resamples: int) -> dict[str, Figure]:
    accuracy = metrics.share(given, metrics.right_state, resamples)
    error = metrics.share(given, metrics.state_error, resamples)
    changes = np.array([[getattr(o.truth.change, name) for name in STATE_NAMES] for o in given])
    if len(changes):
        best = np.mean([metrics.commonest(column.tolist()) for column in changes.T])
        middle = np.abs(changes - np.median(changes, 0)).mean()
        accuracy, error = with_chance(accuracy, float(best)), with_chance(error, float(middle))
    return {"acc_s": accuracy, "mae_s": error}


def _level_error(given: Sequence[Outcome], drawn: Sequence[Outcome], resamples: int) -> Figure:
    figure = metrics.share(given, metrics.level_error, resamples)
    ceiling = metrics.share(drawn, metrics.level_error, 1).value
    levels = np.array([o.truth.level for o in given])
    middle = float(np.abs(levels - np.median(levels)).mean()) if len(levels) else None
    return with_ceiling(with_chance(figure, middle), ceiling)


def _hidden(results: dict[str, SetResult], window: int, resamples: int) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for name, sources, inside in (
        ("hidden_attributes", ["standard"], True),
        ("hidden_attributes_window_1", ["window_1"], True),
        # Rarer, so that the skill games' turns are counted too.
        ("hidden_attributes_beyond_window", ["standard", "skill"], False),
    ):
        there = [results[source] for source in sources if source in results]
        given = [o for result in there for o in opened(result.given, result)]
        drawn = [o for result in there for o in opened(result.drawn, result)]
        figure = metrics.hidden_attributes(given, window, resamples, inside=inside)
        ceiling = metrics.hidden_attributes(drawn, window, 1, inside=inside).value
        found[name] = with_ceiling(figure, ceiling)
    chance = found["hidden_attributes"].chance
    found["hidden_attributes_chance"] = Figure(chance, chance, chance, found["hidden_attributes"].n)
    return found


def opened(outcomes: Iterable[Outcome], result: SetResult) -> list[Outcome]:
    """The turns of games with an opening: only there does anything given show what to keep."""
    names = {e.episode for e in result.games.episodes if e.shots[0].turn == 0}
    shots = result.games.shots()
    return [o for o, shot in zip(outcomes, shots, strict=False) if shot.episode in names]


def _language(result: SetResult | None, resamples: int) -> Figure:
    if result is None:
        return NOTHING
    by_language: dict[str, list[Outcome]] = {}
    for o in result.given:
        by_language.setdefault(o.language, []).append(o)
    english = by_language.pop("en", [])
    if not english or not by_language:
        return NOTHING
    scores = (metrics.right_characters, metrics.right_motion, metrics.right_background)
    return metrics.worst_drop(english, list(by_language.values()), scores, resamples)


def _unseen(given: Sequence[Outcome], result: SetResult, world: World) -> list[Outcome]:
    marks = [world.unseen_skill(shot) for shot in result.games.shots()]
    return [o for o, mark in zip(given, marks, strict=False) if mark]


def _long(result: SetResult | None, resamples: int) -> Figure:
    if result is None:
        return NOTHING
    first = [o for o in result.given if o.turn in LONG_FIRST]
    last = [o for o in result.given if o.turn in LONG_LAST]
    if not last:
        return NOTHING
    scores = (metrics.right_characters, metrics.right_background)
    return metrics.worst_drop(first, [last], scores, resamples)


def _pictures(result: SetResult | None, resamples: int) -> dict[str, Figure]:
    if result is None or not result.drawn:
        return {"sharpness": NOTHING, "autoencoder_psnr_db": NOTHING}
    names = [o.game for o in result.given]
    sharpness = metrics.ratio(list(zip(names, *result.sharpness, strict=True)), resamples)
    quality = metrics.mean(list(zip(names, result.psnrs, strict=True)), resamples)
    return {"sharpness": with_ceiling(sharpness, 1.0), "autoencoder_psnr_db": quality}


def levels_table(result: SetResult, resamples: int) -> list[dict[str, Any]]:
    """Per true motion level: shots, ACC-F of generated and of drawn shots, mean level given."""
    rows = []
    for level in range(1, metrics.LEVELS + 1):
        given = [o for o in result.given if o.truth.level == level]
        drawn = [o for o in result.drawn if o.truth.level == level]
        seen = [o.given.level for o in given if o.given is not None]
        rows.append(
            {
                "level": level,
                "n": len(given),
                "acc_f": metrics.share(given, metrics.right_level, resamples).value,
                "ceiling": metrics.share(drawn, metrics.right_level, 1).value,
                "mean_level_generated": float(np.mean(seen)) if seen else None,
            }
        )
    return rows


def attributes(
    result: SetResult, window: int, resamples: int
) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Hidden attributes inside and beyond the window by kind: scarf, landmark, vehicle."""
    given = opened(result.given, result)
    tables = {
        name: metrics.attributes_by_kind(given, window, resamples, inside=inside)
        for name, inside in (("inside", True), ("beyond", False))
    }
    return {
        name: {kind: figure.as_dict() for kind, figure in kinds.items()}
        for name, kinds in tables.items()
    }
