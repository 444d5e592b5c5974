"""Known answers of every measure."""

from dataclasses import replace

import numpy as np
import pytest

from animegamer.evaluation import metrics
from animegamer.evaluation.truth import Outcome, Reading
from animegamer.game import CharacterState


def reading(**changes):
    base = Reading(
        frozenset({"Ada"}),
        "walk",
        "field",
        "day",
        3,
        CharacterState(1, 0, -2),
        attributes={"scarf:Ada": "red", "landmark": "tower"},
    )
    return replace(base, **changes)


def outcome(given, game="g", turn=2, showings=None, truth=None, language="en"):
    return Outcome(game, turn, language, truth or reading(), given, showings or {})


SCORES = {
    "characters": metrics.right_characters,
    "motion": metrics.right_motion,
    "place": metrics.right_background,
    "time_of_day": metrics.right_time,
    "level": metrics.right_level,
    "change": metrics.right_state,
}


def test_perfect_shot_is_right_in_everything():
    perfect = outcome(reading(predicted_level=3))
    assert all(score(perfect) == 1 for score in SCORES.values())
    assert metrics.level_error(perfect) == metrics.state_error(perfect) == 0
    assert metrics.right_predicted_level(perfect) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("characters", frozenset({"Bo"})),
        ("characters", frozenset({"Ada", "Bo"})),
        ("characters", frozenset()),
        ("motion", "sit"),
        ("place", "room"),
        ("time_of_day", "night"),
        ("level", 5),
        ("change", CharacterState(0, 1, 0)),
    ],
)
def test_one_thing_changed_is_wrong_there_and_only_there(name, wrong):
    changed = outcome(reading(**{name: wrong}))
    assert {key for key, score in SCORES.items() if score(changed) < 1} == {name}


def test_errors_are_counted_in_levels_and_points():
    assert metrics.level_error(outcome(reading(level=1))) == 2
    off = outcome(reading(change=CharacterState(1, 3, -2)))
    assert metrics.right_state(off) == pytest.approx(2 / 3)
    assert metrics.state_error(off) == pytest.approx(1)


def test_missing_shot_is_wrong_with_the_largest_error():
    missing = outcome(None)
    assert all(score(missing) == 0 for score in SCORES.values())
    assert metrics.level_error(missing) == 2
    assert metrics.state_error(missing) == pytest.approx((6 + 5 + 7) / 3)
    assert metrics.right_attribute(missing, "landmark") == 0


def test_shuffled_answers_fall_to_chance():
    rng = np.random.default_rng(0)
    names = [str(n) for n in rng.choice(["walk", "sit", "run", "fly"], 4000)]
    given = rng.permutation(names)
    items = [
        outcome(reading(motion=str(g)), f"g{i % 40}", truth=reading(motion=t))
        for i, (t, g) in enumerate(zip(names, given, strict=True))
    ]
    figure = metrics.share(items, metrics.right_motion, 200)
    assert figure.low < 0.25 < figure.high
    assert metrics.commonest(o.truth.motion for o in items) == pytest.approx(0.25, abs=0.02)


def test_commonest_answer():
    assert metrics.commonest("aab") == pytest.approx(2 / 3)
    assert metrics.commonest([]) is None


def test_bootstrap_draws_games_not_shots():
    # Within a game all shots agree: 20 games of 50 shots say as much as 20 shots.
    scores = [(f"g{g}", float(g % 2)) for g in range(20) for _ in range(50)]
    figure = metrics.mean(scores, 2000)
    assert figure.value == 0.5 and figure.n == 1000
    assert figure.high - figure.low == pytest.approx(2 * 1.96 * 0.5 / 20**0.5, rel=0.15)


def test_bootstrap_covers_the_truth_about_95_percent_of_the_time():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        scores = [(g, float(rng.random() < 0.7)) for g in range(60) for _ in range(3)]
        figure = metrics.mean(scores, 300, seed=trial)
        covered += figure.low <= 0.7 <= figure.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_is_reproducible_and_copes_with_little():
    scores = [("a", 1.0), ("b", 0.0), ("c", 1.0)]
    assert metrics.mean(scores, 100) == metrics.mean(scores, 100)
    one = metrics.mean([("a", 1.0)], 100)
    assert (one.value, one.low, one.high, one.n) == (1, 1, 1, 1)
    assert metrics.mean([], 100) == metrics.NOTHING
    assert metrics.ratio([("a", 1.0, 0.0)], 100) == metrics.NOTHING


def test_ratio_is_sum_over_sum():
    figure = metrics.ratio([("a", 1.0, 2.0), ("b", 3.0, 2.0)], 50)
    assert figure.value == 1.0


def test_hidden_attributes_count_by_distance():
    items = [
        outcome(reading(), showings={"scarf:Ada": 1, "landmark": 4}),
        outcome(
            reading(attributes={"scarf:Ada": "blue", "landmark": "tower"}),
            "h",
            showings={"scarf:Ada": 2, "landmark": 5},
        ),
    ]
    inside = metrics.hidden_attributes(items, window=5, resamples=50)
    beyond = metrics.hidden_attributes(items, window=5, resamples=50, inside=False)
    assert (inside.value, inside.n) == (pytest.approx(2 / 3), 3)
    assert (beyond.value, beyond.n) == (1, 1)
    assert metrics.hidden_attributes(items, window=1, resamples=50).n == 0
    by_kind = metrics.attributes_by_kind(items, window=5, resamples=50)
    assert by_kind["scarf"].value == 0.5 and by_kind["landmark"].n == 1


def test_scarf_on_nobody_is_no_scarf():
    gone = outcome(reading(characters=frozenset({"Bo"})))
    assert metrics.right_attribute(gone, "scarf:Ada") == 0
    assert metrics.right_attribute(gone, "landmark") == 1


def test_attribute_chance_is_taken_by_kind():
    def item(scarf, landmark):
        truth = reading(attributes={"scarf:Ada": scarf, "landmark": landmark})
        return outcome(None, truth=truth)

    pairs = [(item("red", "tower"), a) for a in ("scarf:Ada", "landmark")]
    pairs += [(item("red", "none"), a) for a in ("scarf:Ada", "landmark")]
    assert metrics.attribute_chance(pairs) == pytest.approx(3 / 4)
    assert metrics.attribute_chance([]) is None


def test_worst_drop_takes_the_worst_language_and_score():
    english = [outcome(reading(), f"g{i}") for i in range(10)]
    chinese = [outcome(reading(motion="sit") if i < 2 else reading(), f"g{i}") for i in range(10)]
    japanese = [outcome(reading(place="room") if i < 5 else reading(), f"g{i}") for i in range(10)]
    scores = (metrics.right_characters, metrics.right_motion, metrics.right_background)
    figure = metrics.worst_drop(english, [chinese, japanese], scores, 200)
    assert figure.value == pytest.approx(0.5) and figure.n == 30
    assert 0.1 < figure.low < 0.5 < figure.high < 0.9
    assert metrics.worst_drop(english, [english], scores, 50).value == 0


def test_sharpness_of_known_pictures():
    stripes = np.zeros((2, 8, 8, 3), np.uint8)
    stripes[:, :, ::2] = 255
    assert metrics.gradient_energy(stripes) == pytest.approx(1)
    assert metrics.gradient_energy(np.full_like(stripes, 90)) == 0
    half = (stripes // 2).astype(np.uint8)
    assert metrics.gradient_energy(half) == pytest.approx(0.25, rel=0.02)


def test_psnr():
    black = np.zeros((1, 4, 4, 3), np.uint8)
    assert metrics.psnr(black, black) == float("inf")
    assert metrics.psnr(black + 255, black) == pytest.approx(0)
    assert metrics.psnr(black + 16, black) == pytest.approx(20 * np.log10(255 / 16), rel=1e-5)
    with pytest.raises(ValueError, match="sizes differ"):
        metrics.psnr(black, black[:, :2])


def test_confusion_rows_are_shares_of_the_truth():
    matrix = metrics.confusion([("a", "a"), ("a", "b"), ("b", "b"), ("x", "a")], ["a", "b", "c"])
    assert matrix.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]]
