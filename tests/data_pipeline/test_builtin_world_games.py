"""The built-in world's games: who plays what, what it changes, and the files it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest

from animegamer.game import Instruction
from animegamer.records import read_episodes, read_shots
from animegamer.video import read_video
from data_pipeline.builtin_world import words
from data_pipeline.builtin_world.dataset import Job, draw
from data_pipeline.builtin_world.games import (
    SKILLED,
    Game,
    generate_game,
    is_held_out,
)
from data_pipeline.builtin_world.looks import CHARACTERS, LOOKS
from data_pipeline.builtin_world.motions import MOTIONS, TRAVEL
from data_pipeline.builtin_world.places import PLACES
from data_pipeline.builtin_world.renderer import render
from data_pipeline.builtin_world.rules import Before, state_change


@lru_cache(maxsize=8)
def games(split: str = "train", kind: str = "mixed", count: int = 600) -> tuple[Game, ...]:
    return tuple(generate_game(split, index, kind=kind) for index in range(count))


def shares(values) -> dict:
    counts = Counter(values)
    return {value: count / sum(counts.values()) for value, count in counts.items()}


def asked(split: str = "train", kind: str = "mixed", count: int = 600):
    return [t for game in games(split, kind, count) for t in game.turns if t.instruction]


def test_a_game_depends_on_split_kind_seed_and_index_only() -> None:
    assert generate_game("train", 3) == generate_game("train", 3)
    others = [
        generate_game("train", 4),
        generate_game("validation", 3),
        generate_game("train", 3, seed=1),
        generate_game("test", 3),
    ]
    assert len({g.seed for g in [generate_game("train", 3), *others]}) == 5


def test_splits_share_no_game() -> None:
    seeds = [{g.seed for g in games(split)} for split in ("train", "validation", "test")]
    assert not (seeds[0] & seeds[1] or seeds[0] & seeds[2] or seeds[1] & seeds[2])


def test_shares_are_balanced() -> None:
    turns = asked()
    for name in ("stamina", "social", "entertainment"):
        found = shares(getattr(t.change, name) for t in turns)
        assert max(found.values()) <= 0.45 and len(found) >= 8, name
    levels = shares(t.scene.intensity for t in turns)
    assert all(0.1 <= share <= 0.35 for share in levels.values()) and len(levels) == 5
    for values in ([t.scene.place for t in turns], [t.scene.time for t in turns]):
        found = shares(values)
        assert max(found.values()) <= 1.5 / len(found)
    motions = shares(t.scene.motion for t in turns)
    most = max(share for motion, share in motions.items() if motion not in SKILLED)
    assert most <= 1.5 / (len(motions) + len(SKILLED))
    assert all(1.5 < motions[skill] * (len(motions) + len(SKILLED)) < 2.5 for skill in SKILLED)
    assert 0.25 < np.mean([len(t.scene.characters) == 2 for t in turns]) < 0.4
    pairs = [t.scene.characters for t in turns if len(t.scene.characters) == 2]
    assert 0.4 < np.mean([LOOKS[a].film != LOOKS[b].film for a, b in pairs]) < 0.6


def test_hidden_attributes_are_uniform_over_shots() -> None:
    shots = [(game, t) for game in games() for t in game.turns]
    scarves = [
        game.attributes.scarves.get(c, "none")
        for game, t in shots
        for c in t.scene.characters
        if c in game.heroes
    ]
    for values in (
        scarves,
        [g.attributes.vehicle for g, _ in shots],
        [g.attributes.landmark for g, _ in shots],
    ):
        found = shares(values)
        assert len(found) == 5 and max(found.values()) <= 1.5 / 5


def test_opening_shots_and_attributes() -> None:
    opened = [game for game in games() if game.turns[0].turn == 0]
    assert 0.75 < len(opened) / len(games()) < 0.85
    for game in games():
        attributes = game.attributes
        assert set(attributes.scarves) <= set(game.heroes)
        if game in opened:
            first = game.turns[0]
            assert first.scene.motion == "stand" and first.scene.characters == game.heroes
            assert first.instruction is None and first.change is None and first.action == ""
            assert attributes.vehicle == attributes.scarves[game.heroes[0]]
            assert 1 <= len(game.turns) - 1 <= 10
        else:
            assert (attributes.vehicle, attributes.landmark) == ("none", "none")
            assert not attributes.scarves and 1 <= len(game.turns) <= 3


@pytest.mark.parametrize("kind", ["mixed", "long"])
def test_characters_start_where_the_last_shot_left_them(kind: str) -> None:
    for game in games(kind=kind, count=60 if kind == "mixed" else 3):
        left: dict[str, str] = {}
        for turn in game.turns:
            scene = turn.scene
            if len(scene.characters) == 1:
                assert scene.slot == left.get(scene.characters[0], "left")
                other = {"left": "right", "right": "left"}[scene.slot]
                end = other if scene.motion in TRAVEL else scene.slot
                assert scene.end_slots() == (end,)
            else:
                assert scene.start_slots() == scene.end_slots() == ("left", "right")
            left = dict(zip(scene.characters, scene.end_slots(), strict=True))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_training_games_hold_no_held_out_combination_and_no_foreign_skill(split: str) -> None:
    for turn in asked(split):
        scene = turn.scene
        assert not any(is_held_out(c, scene.motion, scene.place) for c in scene.characters)
        if scene.motion in SKILLED:
            (character,) = scene.characters
            assert character in SKILLED[scene.motion]


def test_held_out_share_and_test_games_contain_them() -> None:
    every = [is_held_out(c, m, p) for c in CHARACTERS for m in MOTIONS for p in PLACES]
    assert 0.06 < np.mean(every) < 0.14
    found = [
        any(is_held_out(c, t.scene.motion, t.scene.place) for c in t.scene.characters)
        for t in asked("test")
    ]
    assert np.mean(found) > 0.04


def test_kinds_of_test_games() -> None:
    for game in games("test", "standard", 20):
        assert len(game.turns) == 11 and game.turns[0].turn == 0
    for game in games("test", "skill", 20):
        foreign = [
            t
            for t in game.turns
            if t.scene.motion in SKILLED and t.scene.characters[0] not in SKILLED[t.scene.motion]
        ]
        assert len(foreign) >= 3
    assert len(games("test", "long", 3)[0].turns) == 101
    english, chinese, japanese = games("test", "language", 3)
    assert [t.scene for t in english.turns] == [t.scene for t in chinese.turns]
    assert [t.scene for t in english.turns] == [t.scene for t in japanese.turns]
    assert [t.change for t in english.turns] == [t.change for t in japanese.turns]
    assert [g.turns[1].language for g in (english, chinese, japanese)] == ["en", "zh", "ja"]
    with pytest.raises(ValueError, match="endless"):
        generate_game("test", 0, kind="endless")


def test_languages_and_wordings() -> None:
    languages = shares(t.language for t in asked())
    assert 0.44 < languages["en"] < 0.58 and 0.18 < languages["zh"] < 0.32
    canonical = [t for t in asked() if t.language == "en" and t.instruction.motion == t.action]
    assert 0.32 < len(canonical) / len(asked()) < 0.46
    spoken = [{t.language for t in game.turns if t.instruction} for game in games()]
    alone = shares(next(iter(s)) for s in spoken if len(s) == 1)
    assert 0.1 < alone["zh"] and 0.1 < alone["ja"]


def test_training_games_come_back_to_what_was_done() -> None:
    def taken_up(kind: str) -> float:
        acts = [
            [(t.scene.characters, t.scene.motion) for t in game.turns if t.instruction]
            for game in games(kind=kind)
        ]
        later = [(told, i) for told in acts for i in range(1, len(told))]
        return float(np.mean([told[i] in told[max(0, i - 3) : i] for told, i in later]))

    assert 0.2 < taken_up("mixed") < 0.4
    assert taken_up("standard") < 0.1


def test_a_share_of_the_training_games_follows_one_hero() -> None:
    def followed(kind: str) -> float:
        told = [game for game in games(kind=kind) if game.heroes and len(game.turns) > 5]
        shown = [
            np.mean([game.heroes[0] in t.scene.characters for t in game.turns]) for game in told
        ]
        return float(np.mean(np.array(shown) > 0.75))

    assert followed("mixed") > followed("standard") + 0.12


def test_every_skill_is_shown_by_someone_of_each_film_and_asked_of_others() -> None:
    for owners in SKILLED.values():
        assert {LOOKS[owner].film for owner in owners} == {look.film for look in LOOKS.values()}
    shown = {(t.scene.motion, *t.scene.characters) for t in asked() if t.scene.motion in SKILLED}
    assert shown == {(motion, owner) for motion in SKILLED for owner in SKILLED[motion]}


def test_instruction_texts() -> None:
    said = words.instruction(("Mavi", "Juno"), "wave", 1, "town", "night")
    assert str(said) == "Character: Mavi and Juno; Motion: gently wave; Background: night town."
    assert words.instruction(("Mavi",), "wave", 1, "town", "night", "zh") == Instruction(
        ("玛薇",), "轻轻地挥手", "夜晚的小镇"
    )
    assert words.instruction(("Mavi",), "wave", 1, "town", "night", "ja") == Instruction(
        ("マヴィ",), "そっと手を振る", "夜の町"
    )
    for turn in asked()[:400]:
        assert Instruction.parse(str(turn.instruction)) == turn.instruction


def test_wordings_are_never_ambiguous() -> None:
    for language in words.LANGUAGES:
        meaning: dict[str, tuple] = {}
        for motion in MOTIONS:
            for intensity in range(1, 6):
                for together in (False, True):
                    for choice in range(36):
                        text = words.motion_phrase(motion, intensity, language, together, choice)
                        assert meaning.setdefault(text, (motion, intensity)) == (motion, intensity)


def test_rules() -> None:
    alone = ("Mavi",)
    fresh = state_change(alone, "sit", 2, "day", None)
    tired = state_change(alone, "sit", 2, "day", Before("run", -4, alone))
    assert tired.stamina == fresh.stamina + 2
    assert state_change(alone, "sit", 2, "day", Before("run", -2, alone)) == fresh
    again = state_change(alone, "wave", 2, "day", Before("wave", 0, alone))
    assert again.entertainment == state_change(alone, "wave", 2, "day", None).entertainment - 1
    pair = ("Mavi", "Orin")
    first = state_change(pair, "talk", 2, "day", Before("walk", 0, pair))
    assert state_change(pair, "talk", 2, "day", Before("talk", 0, pair)).social == first.social - 2
    assert (
        state_change(pair, "walk", 2, "day", Before("talk", 0, alone)).social
        > state_change(pair, "walk", 2, "day", Before("talk", 0, pair)).social
    )
    assert (
        state_change(alone, "run", 5, "day", None).stamina
        < state_change(alone, "run", 1, "day", None).stamina
    )


def test_output_is_the_same_for_any_number_of_workers(tmp_path) -> None:
    for name, workers in (("one", 1), ("two", 2)):
        draw(Job(tmp_path / name, "train", 3, seed=7, workers=workers))
    files = sorted(
        p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()
    )
    assert files == sorted(
        p.relative_to(tmp_path / "two") for p in (tmp_path / "two").rglob("*") if p.is_file()
    )
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_records_clips_and_resuming(tmp_path) -> None:
    path = draw(Job(tmp_path, "test", 1, kind="standard", seed=2))
    episodes = read_episodes(path, hidden=True)
    assert [len(e.shots) for e in episodes] == [11]
    game = generate_game("test", 0, seed=2, kind="standard")
    for shot, turn in zip(episodes[0].shots, game.turns, strict=True):
        frames, drawn = read_video(tmp_path / shot.clip, 17), render(turn.scene)
        error = np.mean((frames.astype(float) - drawn) ** 2)
        assert 10 * np.log10(255**2 / error) > 39
        assert shot.hidden["vehicle"] == game.attributes.vehicle
        assert shot.labels["characters"] == list(turn.scene.characters)
    assert all(not shot.hidden for shot in read_shots(path))
    assert len(json.loads((tmp_path / "world.json").read_text())["level_edges"]) == 4

    clip = tmp_path / episodes[0].shots[0].clip
    stamp = clip.stat().st_mtime_ns
    draw(Job(tmp_path, "test", 2, kind="standard", seed=2))
    assert clip.stat().st_mtime_ns == stamp
    assert len(read_episodes(path)) == 2 and not (tmp_path / "parts").exists()
    with pytest.raises(ValueError, match="other settings"):
        draw(Job(tmp_path, "test", 2, height=96, width=144))


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['world', '--help']\n"
        "try: runpy.run_module('data_pipeline.builtin_world', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'cv2' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--kind" in result.stdout
