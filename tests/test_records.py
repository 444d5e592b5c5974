"""The JSONL schema: what is written reads back, and a fault is named with its file and line."""

import json
import os
import re

import pytest

from animegamer.game import CharacterState, Instruction
from animegamer.records import (
    Clip,
    RecordError,
    Shot,
    read_clips,
    read_episodes,
    read_shots,
    to_json,
    write_jsonl,
)

CLIP = Clip("c1", "film", "clips/c1.mp4", 0, 2.0, 3, rejected="black frame")


def shot(turn=1, episode="e1", **changes):
    values = dict(
        shot_id=f"{episode}-{turn}",
        film="film",
        split="train",
        episode=episode,
        turn=turn,
        clip=f"clips/{episode}-{turn}.mp4",
        instruction=Instruction(("尼洛", "Mavi"), "wave", "夜の町"),
        action="Nilo and Mavi wave",
        motion_scope=2.5,
        motion_level=2,
        change=CharacterState(-1, 2, 0),
        language="zh",
        labels={"characters": ["nilo", "mavi"], "motion": "wave"},
        hidden={"scarf": "red"},
        seed=7,
    )
    return Shot(**(values | changes))


OPENING = shot(0, instruction=None, change=None, action="", labels={}, seed=None)


def test_shots_round_trip(tmp_path):
    shots = [OPENING, shot(1), shot(2, motion_scope=3)]
    write_jsonl(tmp_path / "shots.jsonl", shots)
    assert read_shots(tmp_path / "shots.jsonl", hidden=True) == shots
    text = (tmp_path / "shots.jsonl").read_text(encoding="utf-8")
    assert "尼洛" in text and text.count("\n") == 3


def test_clips_round_trip(tmp_path):
    clips = [CLIP, Clip("c2", "film", "clips/c2.mp4", 2.0, 4.0, 3)]
    write_jsonl(tmp_path / "clips.jsonl", clips)
    assert read_clips(tmp_path / "clips.jsonl") == clips


def test_hidden_is_removed_unless_asked_for(tmp_path):
    path = tmp_path / "shots.jsonl"
    write_jsonl(path, [OPENING, shot(1)])
    assert [s.hidden for s in read_shots(path)] == [{}, {}]
    assert [s.hidden for e in read_episodes(path) for s in e.shots] == [{}, {}]
    assert [s.hidden for s in read_shots(path, hidden=True)] == [{"scarf": "red"}] * 2
    assert read_episodes(path, hidden=True)[0].shots[1].hidden == {"scarf": "red"}


def line(**changes):
    return json.dumps(json.loads(to_json(shot())) | changes)


def without(name):
    value = json.loads(to_json(shot()))
    del value[name]
    return json.dumps(value)


def fault_of(write, text, read=read_shots):
    path = write("shots.jsonl", text)
    with pytest.raises(RecordError) as caught:
        read(path)
    place, _, message = str(caught.value).partition(": ")
    assert place.startswith(f"{path}:")
    return int(place.rpartition(":")[2]), message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(colour="red"), "unknown field 'colour'"),
        (without("clip"), "no field 'clip'"),
        (line(clip=5), "clip is 5, expected str"),
        (line(turn="1"), "turn is '1', expected int"),
        (line(turn=True), "turn is True, expected int"),
        (line(turn=-1), "turn is -1, expected 0 or more"),
        (line(split="dev"), "split is 'dev', expected one of train, validation, test"),
        (line(seed=1.5), "seed is 1.5, expected int or null"),
        (line(labels=[]), "labels is [], expected dict"),
        (line(motion_scope=-1), "motion_scope is -1, expected 0 or more"),
        (line(motion_scope=float("nan")), "motion_scope is nan, expected 0 or more"),
        (line(motion_scope="fast"), "motion_scope is 'fast', expected float or int"),
        (line(motion_level=0), "motion_level is 0, expected 1 to 5"),
        (line(motion_level=6), "motion_level is 6, expected 1 to 5"),
        (line(instruction=None), "turn 1 has no instruction or no state change"),
        (line(change=None), "turn 1 has no instruction or no state change"),
        (line(instruction="wave"), "instruction is 'wave', expected an object"),
        (line(instruction={"motion": "m"}), "no field 'characters' in instruction"),
        (
            line(instruction={"characters": "Nilo", "motion": "m", "background": "b"}),
            "expected a list of names and two texts",
        ),
        (
            line(instruction={"characters": [], "motion": "m", "background": "b"}),
            "expected a list of names and two texts",
        ),
        (line(change={"stamina": 1, "social": 1}), "no field 'entertainment' in change"),
        (
            line(change={"stamina": 9, "social": 0, "entertainment": 0}),
            "stamina change is 9, expected an integer from -5 to 5",
        ),
        ("[1]", "the line is [1], expected an object"),
        ("{", "Expecting property name"),
        ("\udcff", "can't decode byte 0xff"),
    ],
)
def test_wrong_line_is_named(write, bad, message):
    text = f"{line()}\n\n{bad}\n{line()}\n".encode("utf-8", "surrogateescape")
    number, found = fault_of(write, text)
    assert number == 3
    assert message in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"end": 0.0}, "start is 0 and end 0.0, expected 0 <= start < end"),
        ({"start": -1}, "expected 0 <= start < end"),
        ({"rejected": 1}, "rejected is 1, expected str or null"),
        ({"hidden": {}}, "unknown field 'hidden'"),
    ],
)
def test_wrong_clip_is_named(write, changes, message):
    bad = json.dumps(json.loads(to_json(CLIP)) | changes)
    number, found = fault_of(write, f"{to_json(CLIP)}\n{bad}", read_clips)
    assert number == 2
    assert message in found


def test_a_wrong_record_cannot_be_made_either():
    with pytest.raises(RecordError, match=re.escape("motion_level is 2.0, expected int")):
        shot(motion_level=2.0)
    with pytest.raises(RecordError, match="no instruction"):
        shot(1, instruction=None)


def test_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shots file .*shots\.jsonl: draw or prepare"):
        read_shots(tmp_path / "shots.jsonl")


def test_empty_file(write):
    assert read_shots(write("shots.jsonl", "")) == []
    assert read_episodes(write("shots.jsonl", "\n\n")) == []


def test_episodes_are_in_turn_order(tmp_path):
    path = tmp_path / "shots.jsonl"
    write_jsonl(path, [shot(2), shot(1, "e2"), OPENING, shot(2, "e2"), shot(1)])
    episodes = read_episodes(path)
    assert [(e.episode, [s.turn for s in e.shots]) for e in episodes] == [
        ("e1", [0, 1, 2]),
        ("e2", [1, 2]),
    ]


@pytest.mark.parametrize("turns", [[0, 2], [1, 1], [1, 2, 4]])
def test_turns_with_a_gap(tmp_path, turns):
    path = tmp_path / "shots.jsonl"
    write_jsonl(path, [shot(turn) for turn in turns])
    with pytest.raises(RecordError, match=re.escape(f"episode 'e1' has turns {turns}, expected")):
        read_episodes(path)


def test_a_failed_write_keeps_the_old_records(tmp_path, monkeypatch):
    path = tmp_path / "shots.jsonl"
    write_jsonl(path, [shot(1)])

    def broken():
        yield shot(1)
        raise RuntimeError("drawing failed")

    with pytest.raises(RuntimeError):
        write_jsonl(path, broken())
    assert len(read_shots(path)) == 1
    assert os.listdir(tmp_path) == ["shots.jsonl"]
