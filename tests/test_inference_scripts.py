"""The two scripts that play: what they write, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import inference_Decoder
import inference_MLLM
from animegamer import config as configuration
from animegamer.config import ConfigError
from animegamer.game import (
    STATE_NAMES,
    CharacterState,
    Instruction,
    Meters,
    MotionScope,
    read_script,
)
from animegamer.saved_game import SavedGame, SavedGameError, folders
from animegamer.session import GameSession
from animegamer.video import read_video
from tests.tiny_checkpoint import make_checkpoint, tiny_config

ROOT = Path(__file__).parents[1]
STORY = """# a comment
Opening: first.png

Character: Nilo; Motion: quickly run; Background: day town.
Character: Mavi and Juno; Motion: gently talk; Background: night forest.
角色：尼洛；动作：跳舞；背景：小镇。
"""
SHORT = "Character: Juno; Motion: run; Background: day town.\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint, a play configuration and two scripts, the first one played and drawn."""
    folder = tmp_path_factory.mktemp("play")
    make_checkpoint(folder / "tiny")
    config = tiny_config(folder / "tiny", folder / "out", scripts=(str(folder / "story.txt"),))
    configuration.save(config, folder / "play.yaml")
    (folder / "story.txt").write_text(STORY, encoding="utf-8")
    (folder / "short.txt").write_text(SHORT, encoding="utf-8")
    Image.fromarray(np.full((40, 90, 3), 99, np.uint8)).save(folder / "first.png")
    for script in (inference_MLLM, inference_Decoder):
        assert script.main(["--config", str(folder / "play.yaml")]) == 0
    return folder


def play(place, *overrides, script=inference_MLLM):
    return script.main(["--config", str(place / "play.yaml"), *overrides])


def test_the_game_file_tells_the_game(place):
    tree = json.loads((place / "out" / "game.json").read_text(encoding="utf-8"))
    assert (tree["format"], tree["version"]) == ("animegamer game", 1)
    assert tree["opening"] == {"source": (place / "first.png").as_posix(), "picture": "turn_00.png"}
    assert tree["settings"]["window"] == 5 and tree["settings"]["history"] == "predicted"
    assert [turn["turn"] for turn in tree["turns"]] == [1, 2, 3]
    asked = read_script(place / "story.txt").instructions
    meters = Meters()
    for turn, instruction in zip(tree["turns"], asked, strict=True):
        names = {"尼洛": "Nilo"}
        characters = [names.get(name, name) for name in instruction.characters]
        assert turn["meters"] == meters.apply(characters, CharacterState(**turn["change"]))
        assert turn["motion_scope"]["scalar"] == MotionScope(turn["motion_scope"]["level"]).scalar
        assert Instruction(**{**turn["instruction"], "characters": instruction.characters}) == (
            instruction
        )
        assert list(turn["change"]) == list(STATE_NAMES)
        for file in (turn["files"]["s_a_hat"]["file"], turn["files"]["shot"]):
            assert (place / "out" / file).is_file()


def test_the_representations_are_those_of_a_session(place):
    stored = load_file(place / "out" / "s_a_hat.safetensors")
    assert list(stored) == ["turn_01", "turn_02", "turn_03"]
    config = configuration.load(place / "play.yaml")
    session = GameSession.load(config, draw=False)
    session.open(place / "first.png")
    for turn, instruction in enumerate(read_script(place / "story.txt").instructions, 1):
        state = session.step(instruction)
        np.testing.assert_allclose(stored[f"turn_{turn:02d}"], state.s_a, atol=1e-5)


def test_videos_play_in_browsers_and_are_enlarged(place):
    for turn in (1, 2, 3):
        path = place / "out" / f"turn_{turn:02d}.mp4"
        with av.open(str(path)) as container:
            (stream,) = container.streams
            assert stream.codec_context.name == "h264"
            assert stream.codec_context.pix_fmt == "yuv420p"
            assert stream.average_rate == 8
            assert sum(1 for _ in container.decode(stream)) == 5
        assert read_video(path).shape == (5, 64, 96, 3)


def test_the_storyboard_shows_the_game(place):
    with Image.open(place / "out" / "storyboard.png") as page:
        assert page.width == 1382 and page.height > 600
        assert len(page.convert("RGB").getcolors(1 << 24)) > 500


def test_the_opening_lies_beside_the_game_as_the_model_saw_it(place):
    with Image.open(place / "out" / "turn_00.png") as picture:
        assert picture.size == (24, 16)


def test_several_scripts_are_played_as_one_batch(place, capsys):
    scripts = f"play.scripts=[{place}/story.txt,{place}/short.txt]"
    assert play(place, scripts, f"play.output={place}/both") == 0
    assert play(place, scripts, f"play.output={place}/both", script=inference_Decoder) == 0
    both = place / "both"
    assert len(SavedGame.read(both / "short").turns) == 1
    alone = load_file(place / "out" / "s_a_hat.safetensors")
    together = load_file(both / "story" / "s_a_hat.safetensors")
    for turn in alone:
        np.testing.assert_allclose(alone[turn], together[turn], atol=1e-4)
    assert (both / "short" / "storyboard.png").is_file()
    first, second = (read_video(f / "turn_01.mp4") for f in (place / "out", both / "story"))
    assert abs(first.astype(int) - second).max() <= 3


def test_a_reencoded_game_is_drawn_while_it_is_played(place):
    output = f"play.output={place}/again"
    assert play(place, output, "play.history=reencoded", "play.upscale=8") == 0
    assert read_video(place / "again" / "turn_03.mp4").shape == (5, 128, 192, 3)
    assert json.loads((place / "again" / "game.json").read_text())["settings"]["history"] == (
        "reencoded"
    )


def test_a_shorter_game_leaves_nothing_of_the_longer_one(place):
    output = f"play.output={place}/shrink"
    assert play(place, output, "play.history=reencoded") == 0
    assert play(place, output, f"play.scripts=[{place}/short.txt]") == 0
    assert [path.name for path in sorted((place / "shrink").glob("*.mp4"))] == ["turn_01.mp4"]


def test_stopping_keeps_what_was_played(place, monkeypatch, capsys):
    step, calls = GameSession.step_batch, []

    def interrupted(session, games, instructions):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(session, games, instructions)

    monkeypatch.setattr(GameSession, "step_batch", interrupted)
    assert play(place, f"play.output={place}/stopped") == 130
    assert capsys.readouterr().err.endswith("inference_MLLM.py: stopped\n")
    assert len(SavedGame.read(place / "stopped").turns) == 2


def test_stopping_at_once_spoils_no_earlier_game(place, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = (place / "out" / "game.json").read_bytes()
    monkeypatch.setattr(GameSession, "step_batch", interrupted)
    assert play(place) == 130
    assert (place / "out" / "game.json").read_bytes() == before


def test_names_that_the_checkpoint_does_not_know_are_played_with_a_note(place, capsys):
    (place / "open.txt").write_text(
        "Character: Zed and Nilo; Motion: run; Background: the moon.\n", encoding="utf-8"
    )
    assert play(place, f"play.scripts=[{place}/open.txt]", f"play.output={place}/open") == 0
    error = capsys.readouterr().err
    assert "note: unknown: Zed, the moon (open language is allowed" in error
    assert "trained on: Nilo, Mavi, Juno, town, forest" in error
    assert play(place) == 0
    assert "unknown" not in capsys.readouterr().err


def complains(capsys, place, words, *overrides, script=inference_MLLM):
    """The script ends with code 2 and one line that has the words, after a progress bar at most."""
    assert play(place, *overrides, script=script) == 2
    out, error = capsys.readouterr()
    *bars, error = error.rstrip("\n").split("\n")
    assert out == "" and all("0%" in bar for bar in bars) and error.startswith(script.__name__)
    for word in words:
        assert word in error
    return error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["holds no instruction"]),
        (b"# only a comment\n", ["holds no instruction"]),
        (b"Nilo runs.\n", ["bad.txt:1", "Motion:"]),
        (SHORT.encode() + b"Character: Nilo; Motion: run.\n", ["bad.txt:2", "no background"]),
        ("Character: Nilo\n".encode("utf-16"), ["bad.txt:1", "UTF-8"]),
        (b"Opening: none.png\n" + SHORT.encode(), ["bad.txt:1", "none.png"]),
        (b"Opening: bad.txt\n" + SHORT.encode(), ["bad.txt"]),
        (b"Character: Nilo; Motion: <img> run; Background: town.\n", ["<img>"]),
    ],
)
def test_a_bad_script_is_one_clear_line(place, capsys, content, words):
    (place / "bad.txt").write_bytes(content)
    complains(capsys, place, words, f"play.scripts=[{place}/bad.txt]")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("play.scripts=[missing.txt]", ["missing.txt"]),
        ("play.checkpoint=missing", ["no checkpoint directory missing"]),
        ("play.windows=3", ["play.windows", "did you mean play.window"]),
        ("play.window=0", ["window"]),
        ("play.opening=missing.png", ["missing.png"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_a_bad_setting_is_one_clear_line(place, capsys, override, words):
    complains(capsys, place, words, override)


def test_a_damaged_checkpoint_is_one_clear_line(place, capsys):
    file = place / "tiny" / "mllm" / "projections.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    try:
        complains(capsys, place, ["mllm", "truncated"])
    finally:
        file.write_bytes(content)


def test_a_damaged_game_is_one_clear_line(place, capsys):
    folder = place / "damaged"
    output = f"play.output={folder}"
    complains(capsys, place, ["play the game first"], output, script=inference_Decoder)
    folder.mkdir()
    for name in ("game.json", "s_a_hat.safetensors", "turn_00.png"):
        (folder / name).write_bytes((place / "out" / name).read_bytes())
    (folder / "s_a_hat.safetensors").write_bytes(b"short")
    complains(capsys, place, ["s_a_hat.safetensors"], output, script=inference_Decoder)
    (folder / "game.json").write_text('{"format": "animegamer game", "version": 2}')
    complains(capsys, place, ["game.json", "version 2"], output, script=inference_Decoder)
    (folder / "game.json").write_text("[1]")
    with pytest.raises(SavedGameError, match="version 1"):
        SavedGame.read(folder)


def test_videos_are_not_shrunk(place, capsys):
    complains(capsys, place, ["play.upscale is 0"], "play.upscale=0", script=inference_Decoder)


def test_equal_names_get_folders_of_their_own():
    assert folders("out", ["a/x.txt"]) == [Path("out")]
    names = [f.name for f in folders("out", ["a/x.txt", "b/x.txt", "y.txt", "c/x.md"])]
    assert names == ["x", "x_2", "y", "x_3"]


@pytest.mark.parametrize("script", ["inference_MLLM.py", "inference_Decoder.py"])
def test_a_process_ends_with_code_2_and_no_traceback(tmp_path, script):
    arguments = ["play.scripts=[none.txt]", f"play.output={tmp_path}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--config", str(tmp_path / "none.yaml"), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{script}: no configuration file") and "Trace" not in done.stderr


def test_the_demo_files_can_be_read():
    for path in sorted((ROOT / "game_demo").glob("*.txt")):
        script = read_script(path)
        assert script.opening is None or script.opening.suffix == ".png"
    assert len(read_script(ROOT / "game_demo" / "demo.txt").instructions) == 10


def test_the_shipped_configuration_plays_the_demo():
    path = ROOT / "configs" / "tiny" / "play.yaml"
    config = configuration.load(path)
    assert config.play.checkpoint == "checkpoints/tiny"
    assert config.play.scripts == ("game_demo/demo.txt",)
    with pytest.raises(ConfigError):
        configuration.load(path, ["play.upscale=big"])
