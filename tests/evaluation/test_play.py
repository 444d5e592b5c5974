"""Sets of games: played whole, kept, resumed, and never mixed up."""

import json
from dataclasses import replace

import numpy as np
import pytest

from animegamer.config import Config, PlayConfig
from animegamer.evaluation.games import GameSet
from animegamer.evaluation.play import identity, load_set, play_set, seconds_alone
from animegamer.records import read_episodes
from tests.evaluation.worlds import SHOT, FakeSession, paint, write_games


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    directory = tmp_path_factory.mktemp("games")
    shots = write_games(directory, 3, 4)
    return shots, GameSet(
        "standard", directory, tuple(read_episodes(directory / "shots.jsonl", hidden=True))
    )


def test_every_turn_is_played_in_order_and_stored_as_it_came(drawn, tmp_path):
    shots, games = drawn
    session = FakeSession(shots)
    played = play_set(session, games, tmp_path / "s", {"a": 1})
    asked = games.shots()
    assert len(asked) == len(played.states) == len(played.frames) == 12
    assert [state.motion_scope.level for state in played.states] == [s.motion_level for s in asked]
    for shot, frames in zip(asked, played.frames, strict=True):
        assert np.array_equal(frames, paint(shot.labels, shot.hidden))
    assert [path.name for path in session.opened] == [
        f"test-standard-{g:03d}-t000.mp4" for g in range(3)
    ]


def test_finished_set_is_used_again_only_for_the_same_key(drawn, tmp_path):
    shots, games = drawn
    first = play_set(FakeSession(shots), games, tmp_path / "s", {"a": 1})
    again = FakeSession(shots)
    second = play_set(again, games, tmp_path / "s", {"a": 1})
    assert again.stepped == 0
    assert second.states == first.states and np.array_equal(second.frames, first.frames)
    play_set(again, games, tmp_path / "s", {"a": 2})
    assert again.stepped == 12


def test_set_broken_off_is_played_anew(drawn, tmp_path):
    shots, games = drawn
    session = FakeSession(shots)

    def stop(games_, instructions):
        raise KeyboardInterrupt

    original, session.step_batch = session.step_batch, stop
    with pytest.raises(KeyboardInterrupt):
        play_set(session, games, tmp_path / "s", {"a": 1})
    assert load_set(tmp_path / "s", {"a": 1}) is None
    session.step_batch = original
    assert None not in play_set(session, games, tmp_path / "s", {"a": 1}).states


def test_game_that_fails_ends_alone_and_its_turns_are_missing(drawn, tmp_path):
    shots, games = drawn
    session = FakeSession(shots)
    session.fail = {("test-standard-001", 3)}
    played = play_set(session, games, tmp_path / "s", {"a": 1})
    missing = [
        (s.episode, s.turn)
        for s, state in zip(games.shots(), played.states, strict=True)
        if state is None
    ]
    assert missing == [("test-standard-001", 3), ("test-standard-001", 4)]
    stored = load_set(tmp_path / "s", {"a": 1})
    assert [state is None for state in stored.states] == [s is None for s in played.states]


def test_turns_nobody_judges_are_played_without_pictures(drawn, tmp_path):
    shots, games = drawn
    session = FakeSession(shots)
    some = replace(games, judged=frozenset({1, 4}))
    played = play_set(session, some, tmp_path / "s", {"a": 1})
    assert session.stepped == 12 and session.drawn == 6
    assert session.drawer is not None
    assert [s.turn for s in some.shots()] == [1, 4] * 3 and None not in played.states


def test_window_of_a_set_overrides_the_session(drawn, tmp_path):
    shots, games = drawn
    session = FakeSession(shots, Config(shot=SHOT, play=PlayConfig(window=4, sink=1)))
    seen = []
    step = session.step_batch

    def watched(batch, instructions):
        seen.append([len(game.history.visible()) for game in batch])
        return step(batch, instructions)

    session.step_batch = watched
    play_set(session, replace(games, window=1), tmp_path / "s", {"a": 1})
    assert all(count == 0 for counts in seen for count in counts)


def test_identity_follows_what_changes_a_game(drawn):
    _, games = drawn
    config = Config(shot=SHOT)
    base = identity(config, "w", games)
    assert json.loads(json.dumps(base)) == base
    assert (
        identity(replace(config, evaluate=replace(config.evaluate, bootstrap=5)), "w", games)
        == base
    )
    others = [
        identity(config, "x", games),
        identity(config, "w", replace(games, window=1)),
        identity(config, "w", replace(games, episodes=games.episodes[:2])),
        identity(replace(config, play=replace(config.play, sink=1)), "w", games),
        identity(replace(config, sampling=replace(config.sampling, steps=3)), "w", games),
    ]
    assert all(other != base for other in others)


def test_seconds_alone(drawn):
    shots, games = drawn
    session = FakeSession(shots)
    assert 0 <= seconds_alone(session, games) < 5
    assert session.stepped == 4
