"""Figures over judged games: pure functions, each a mean with a bootstrap interval over games.

A turn that the game failed to give counts as wrong, with the largest possible error where an error
is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from animegamer.evaluation.truth import Outcome, inside_window
from animegamer.game import MAX_CHANGE, STATE_NAMES, MotionScope

LEVELS = len(MotionScope.SCALARS)
Score = Callable[[Outcome], float]


@dataclass(frozen=True)
class Figure:
    """One number of the report.

    Attributes:
        value: mean; None where nothing could be measured.
        low: lower end of its 95 % interval.
        high: upper end.
        n: what it is a mean of (shots, or hidden attributes in shots).
        chance: share right for who always gives the commonest answer, where that means something.
        ceiling: the same measure on the drawn shots, passed through the first stage.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    chance: float | None = None
    ceiling: float | None = None

    def as_dict(self) -> dict[str, float | int | None]:
        """For ``metrics.json``; chance and ceiling only where there are some."""
        full = asdict(self)
        return {k: v for k, v in full.items() if v is not None or k not in ("chance", "ceiling")}


NOTHING = Figure(None, None, None, 0)


def estimate(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    n: int,
    resamples: int,
    seed: int = 0,
) -> Figure:
    """A statistic of sums over games, with its bootstrap interval.

    Args:
        sums: (games, columns) float, each game's sums.
        statistic: takes (R, columns) totals, gives (R,) values; NaN where undefined.
        n: what the figure counts.
        resamples: draws of games, with replacement.
        seed: of the draws.

    Returns:
        Value on all games, 2.5 % and 97.5 % quantiles over the draws.
    """
    if not len(sums) or not n:
        return NOTHING
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(sums.sum(0, keepdims=True))[0])
        if not np.isfinite(value):
            return NOTHING
        counts = np.random.default_rng(seed).multinomial(
            len(sums), np.full(len(sums), 1 / len(sums)), size=resamples
        )
        draws = statistic(counts @ sums)
    draws = draws[np.isfinite(draws)]
    low, high = np.quantile(draws, (0.025, 0.975)) if len(draws) else (value, value)
    return Figure(value, float(low), float(high), n)


def mean(scored: Iterable[tuple[Hashable, float]], resamples: int, seed: int = 0) -> Figure:
    """Mean of (game, score) pairs, the interval over games."""
    return ratio([(game, score, 1.0) for game, score in scored], resamples, seed)


def ratio(items: Sequence[tuple[Hashable, float, float]], resamples: int, seed: int = 0) -> Figure:
    """Sum over sum of (game, above, below) triples, the interval over games."""
    sums: dict[Hashable, np.ndarray] = {}
    for game, above, below in items:
        sums[game] = sums.get(game, np.zeros(2)) + (above, below)
    table = np.array(list(sums.values())).reshape(-1, 2)
    return estimate(table, lambda s: s[:, 0] / s[:, 1], len(items), resamples, seed)


def share(outcomes: Iterable[Outcome], score: Score, resamples: int, seed: int = 0) -> Figure:
    """Mean score of turns."""
    return mean([(o.game, score(o)) for o in outcomes], resamples, seed)


def commonest(answers: Iterable[Hashable]) -> float | None:
    """Share right for who always gives the commonest true answer."""
    counts = Counter(answers)
    return max(counts.values()) / counts.total() if counts else None


def right_characters(outcome: Outcome) -> float:
    """1 if exactly the named characters are in the shot."""
    return float(outcome.given is not None and outcome.given.characters == outcome.truth.characters)


def right_motion(outcome: Outcome) -> float:
    """1 if the motion is the one asked for."""
    return float(outcome.given is not None and outcome.given.motion == outcome.truth.motion)


def right_background(outcome: Outcome) -> float:
    """1 if the place is the one asked for."""
    return float(outcome.given is not None and outcome.given.place == outcome.truth.place)


def right_time(outcome: Outcome) -> float:
    """1 if the time of day is the one asked for."""
    given = outcome.given
    return float(given is not None and given.time_of_day == outcome.truth.time_of_day)


def right_level(outcome: Outcome) -> float:
    """ACC-F (paper Sec. 4.3): 1 if the generated frames move at the true level."""
    return float(outcome.given is not None and outcome.given.level == outcome.truth.level)


def level_error(outcome: Outcome) -> float:
    """MAE-F: levels between the generated frames' motion and the truth."""
    true = outcome.truth.level
    if outcome.given is None:
        return float(max(true - 1, LEVELS - true))
    return float(abs(outcome.given.level - true))


def right_predicted_level(outcome: Outcome) -> float:
    """1 if the level that the MLLM predicts is the true one, whatever the decoder makes of it."""
    given = outcome.given
    return float(given is not None and given.predicted_level == outcome.truth.level)


def right_state(outcome: Outcome) -> float:
    """ACC-S: share of the three state changes that are exactly right."""
    return float(np.mean([error == 0 for error in _state_errors(outcome)]))


def state_error(outcome: Outcome) -> float:
    """MAE-S: mean absolute error of the three state changes."""
    return float(np.mean(_state_errors(outcome)))


def _state_errors(outcome: Outcome) -> list[int]:
    true = outcome.truth.change
    if true is None:
        raise ValueError(f"turn {outcome.turn} of game {outcome.game!r} has no true state change")
    given = outcome.given.change if outcome.given is not None else None
    if given is None:
        return [MAX_CHANGE + abs(getattr(true, name)) for name in STATE_NAMES]
    return [abs(getattr(given, name) - getattr(true, name)) for name in STATE_NAMES]


def right_attribute(outcome: Outcome, attribute: str) -> float:
    """1 if a hidden attribute looks as it did; a scarf must be on the character that wears it."""
    given = outcome.given
    if given is None:
        return 0.0
    kind, _, wearer = attribute.partition(":")
    if kind == "scarf" and wearer not in given.characters:
        return 0.0
    return float(given.attributes.get(attribute) == outcome.truth.attributes[attribute])


def hidden_attributes(
    outcomes: Iterable[Outcome], window: int, resamples: int, *, inside: bool = True, seed: int = 0
) -> Figure:
    """Share of hidden attributes kept, among those last shown inside (or beyond) the window."""
    items = [
        (o, attribute)
        for o in outcomes
        for attribute, distance in o.showings.items()
        if inside_window(distance, window) == inside
    ]
    figure = mean([(o.game, right_attribute(o, a)) for o, a in items], resamples, seed)
    return with_chance(figure, attribute_chance(items))


def attribute_chance(items: Sequence[tuple[Outcome, str]]) -> float | None:
    """Share right for who always gives the commonest scarf, landmark and vehicle colour."""
    answers: dict[str, Counter[str]] = {}
    for outcome, attribute in items:
        kind = attribute.partition(":")[0]
        answers.setdefault(kind, Counter())[outcome.truth.attributes[attribute]] += 1
    best = sum(max(counts.values()) for counts in answers.values())
    return best / len(items) if items else None


def attributes_by_kind(
    outcomes: Iterable[Outcome], window: int, resamples: int, *, inside: bool = True, seed: int = 0
) -> dict[str, Figure]:
    """``hidden_attributes`` for scarf, landmark and vehicle apart."""
    scores: dict[str, list[tuple[str, float]]] = {}
    for o in outcomes:
        for attribute, distance in o.showings.items():
            if inside_window(distance, window) == inside:
                kind = attribute.partition(":")[0]
                scores.setdefault(kind, []).append((o.game, right_attribute(o, attribute)))
    return {kind: mean(scores[kind], resamples, seed) for kind in sorted(scores)}


def worst_drop(
    before: Sequence[Outcome],
    after: Sequence[Sequence[Outcome]],
    scores: Sequence[Score],
    resamples: int,
    seed: int = 0,
) -> Figure:
    """The largest fall of any score between one group of turns and any other group.

    Positive is a loss. Games are drawn whole, so groups of the same games stay paired; the
    maximum over several noisy differences is a little above the true one.

    Args:
        before: the turns that set the standard, such as the English ones.
        after: groups to compare, such as the Chinese and the Japanese ones.
        scores: what is compared.
        resamples: bootstrap draws.
        seed: of the draws.
    """
    groups = [before, *after]
    width = len(scores) + 1
    sums: dict[str, np.ndarray] = {}
    for place, group in enumerate(groups):
        for o in group:
            row = sums.setdefault(o.game, np.zeros(width * len(groups)))
            row[place * width : (place + 1) * width] += [1.0, *(score(o) for score in scores)]

    def statistic(totals: np.ndarray) -> np.ndarray:
        cubes = totals.reshape(len(totals), len(groups), width)
        means = cubes[:, :, 1:] / cubes[:, :, :1]
        worst: np.ndarray = (means[:, :1] - means[:, 1:]).max(axis=(1, 2))
        return worst

    table = np.array(list(sums.values())).reshape(len(sums), -1)
    return estimate(table, statistic, sum(len(g) for g in groups), resamples, seed)


def with_chance(figure: Figure, chance: float | None) -> Figure:
    """The figure beside the share that the commonest answer would get."""
    return Figure(figure.value, figure.low, figure.high, figure.n, chance, figure.ceiling)


def with_ceiling(figure: Figure, ceiling: float | None) -> Figure:
    """The figure beside what the drawn shots reach."""
    return Figure(figure.value, figure.low, figure.high, figure.n, figure.chance, ceiling)


def gradient_energy(frames: np.ndarray) -> float:
    """Mean squared gradient of grey frames, in units of full range per pixel squared.

    Args:
        frames: uint8 (F, H, W, 3).
    """
    grey = frames.astype(np.float32).mean(-1) / 255
    across = np.diff(grey, axis=2) ** 2
    down = np.diff(grey, axis=1) ** 2
    return float(across.mean() + down.mean())


def psnr(frames: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 frames; infinite for equal ones."""
    if frames.shape != truth.shape:
        raise ValueError(f"frames of {frames.shape} compared with {truth.shape}: sizes differ")
    error = float(np.mean((frames.astype(np.float32) - truth.astype(np.float32)) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def confusion(pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> np.ndarray:
    """(truth, given) pairs as a matrix of row shares; pairs outside ``names`` are left out.

    Returns:
        (len(names), len(names)) float, rows the truth, each row summing to 1 (or to 0).
    """
    index = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)))
    for true, given in pairs:
        if true in index and given in index:
            counts[index[true], index[given]] += 1
    totals = counts.sum(1, keepdims=True)
    shares: np.ndarray = counts / np.maximum(totals, 1)
    return shares
