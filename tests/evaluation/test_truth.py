"""What records say a shot shows, and when a hidden attribute was last seen."""

import json

import pytest

from animegamer.evaluation.truth import (
    TruthError,
    World,
    game_name,
    inside_window,
    read_truth,
    showings,
)
from animegamer.game import visible_turns
from tests.evaluation.worlds import make_game


def game(casts, motions=None):
    shots = make_game("g", len(casts) - 1)
    for i, (shot, cast) in enumerate(zip(shots, casts, strict=True)):
        shot.labels["characters"] = list(cast)
        if i:
            shot.labels["motion"] = motions[i] if motions else "walk"
        shot.hidden["scarves"] = {"Ada": "red", "Bo": "blue"}
    return shots


def test_only_what_the_shot_shows_is_an_attribute():
    walk, fly = game([["Ada"], ["Ada", "Cy"], ["Bo"]], ["", "walk", "fly"])[1:]
    assert set(read_truth(walk).attributes) == {"scarf:Ada", "landmark"}
    assert set(read_truth(fly).attributes) == {"scarf:Bo", "landmark", "vehicle"}


def test_showings_tell_how_long_ago():
    shots = game([["Ada"], ["Bo"], ["Bo"], ["Ada"], ["Ada"]])
    found = showings(shots)
    assert found[0] == {}
    assert found[1] == {"landmark": 1}, "Bo was never shown before"
    assert found[2] == {"landmark": 1, "scarf:Bo": 1}
    assert found[3] == {"landmark": 1, "scarf:Ada": 3}
    assert found[4] == {"landmark": 1, "scarf:Ada": 1}


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_inside_the_window_is_what_a_session_sees(window):
    played = list(range(8))  # turns 0 to 7, now comes turn 8
    seen = visible_turns(played, window, 0)
    assert [t for t in played if inside_window(8 - t, window)] == seen


def test_sink_turn_is_reported_beyond_the_window():
    assert 0 in visible_turns(range(8), 5, 1)
    assert not inside_window(8 - 0, 5)


def test_missing_label_names_shot_and_label():
    shot = game([["Ada"], ["Ada"]])[1]
    del shot.labels["place"]
    with pytest.raises(TruthError, match=r"g-t001.*place"):
        read_truth(shot)


def test_world(tmp_path):
    with pytest.raises(TruthError, match=r"world\.json"):
        World.read(tmp_path)
    (tmp_path / "world.json").write_text(
        json.dumps(
            {
                "level_edges": [1, 2, 3, 4],
                "films": {"Ada": "A", "Bo": "A", "Cy": "B"},
                "skills": {"fly": ["Ada"]},
            }
        )
    )
    facts = json.loads((tmp_path / "world.json").read_text())
    (tmp_path / "old").mkdir()
    (tmp_path / "old/world.json").write_text(json.dumps(facts | {"skills": {"fly": "Ada"}}))
    with pytest.raises(TruthError, match="list, not 'Ada'"):
        World.read(tmp_path / "old")
    world = World.read(tmp_path)
    shots = game(
        [["Ada"], ["Ada", "Bo"], ["Ada", "Cy"], ["Bo"], ["Ada"]], ["", "walk", "walk", "fly", "fly"]
    )
    assert [world.across_films(shot) for shot in shots] == [False, False, True, False, False]
    assert [world.unseen_skill(shot) for shot in shots] == [False, False, False, True, False]


def test_versions_in_other_languages_are_one_game():
    from dataclasses import replace

    shot = game([["Ada"], ["Ada"]])[1]
    assert game_name(replace(shot, episode="test-0007-ja", language="ja")) == "test-0007"
    assert game_name(shot) == "g"
