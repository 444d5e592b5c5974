"""The page of a played game, and the fonts it is set in."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFont

from animegamer.config import Config, PlayConfig, ShotConfig
from animegamer.fonts import Fonts, cut, wrap
from animegamer.game import CharacterState, GameState, Instruction, Meters, MotionScope
from animegamer.saved_game import SavedGame
from animegamer.storyboard import _bars, story_frames, storyboard
from animegamer.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    characters={"nilo": ("Nilo", "nilo", "尼洛"), "mavi": ("Mavi", "mavi", "玛薇")},
    places={"town": ("town", "小镇")},
    motions={"dance": ("dance", "跳舞")},
    adverbs={"gently": ("gently", "轻轻地")},
    times={"night": ("night", "夜晚")},
)


def saved_game(tmp_path, turns, instruction=None, opening=None):
    config = Config(shot=ShotConfig(5, 8, 16, 24), play=PlayConfig())
    game = SavedGame.begin(config, tmp_path, "game_demo/my_story.txt", opening)
    meters = Meters()
    for turn in range(turns):
        asked = instruction or Instruction(("Nilo", "Mavi")[: 1 + turn % 2], "dance", "night town")
        change = CharacterState(turn % 5 - 2, 1, -1)
        state = GameState(MotionScope(1 + turn % 5), change, np.zeros((3, 4), np.float32))
        game.add(asked, state, meters.apply(asked.characters, change))
    return game


def shots(count, value=None):
    random = np.random.default_rng(0)
    if value is not None:
        return [np.full((3, 16, 24, 3), value, np.uint8)] * count
    return [random.integers(0, 255, (3, 16, 24, 3), np.uint8) for _ in range(count)]


def test_three_frames_tell_a_shot():
    shot = np.arange(17, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    assert story_frames(shot)[:, 0, 0, 0].tolist() == [0, 8, 16]


@pytest.mark.parametrize(("turns", "width"), [(1, 720), (2, 1382), (10, 1382), (13, 2706)])
def test_the_page_grows_with_the_story(tmp_path, turns, width):
    page = storyboard(saved_game(tmp_path, turns), shots(turns))
    assert page.width == width and page.mode == "RGB"
    assert page.height > 150 * -(-turns // max(1, round(width / 660)))
    colours = page.getcolors(maxcolors=1 << 24)
    assert len(colours) > 500
    assert max(colours)[0] < 0.8 * page.width * page.height  # not blank


def test_every_shot_is_on_the_page(tmp_path):
    values = (10, 60, 110, 160, 210)
    page = storyboard(saved_game(tmp_path, 5), [shots(1, value)[0] for value in values])
    for value in values:
        assert (np.asarray(page) == value).all(-1).sum() > 3 * 100 * 50


def test_the_opening_is_on_the_page(tmp_path):
    Image.new("RGB", (48, 32), (1, 254, 3)).save(tmp_path / "o.png")
    page = storyboard(saved_game(tmp_path, 2, opening=tmp_path / "o.png"), shots(2, 9))
    assert (np.asarray(page) == (1, 254, 3)).all(-1).sum() > 5000


def test_changed_meters_change_the_page(tmp_path):
    one, other = saved_game(tmp_path, 1), saved_game(tmp_path, 1)
    other.turns[0].meters["Nilo"]["stamina"] += 20
    pages = [np.asarray(storyboard(game, shots(1, 9))) for game in (one, other)]
    assert (pages[0] != pages[1]).any()


def test_a_bar_knows_what_the_meter_was_before(tmp_path):
    game = saved_game(tmp_path, 3)
    bars = _bars(game)
    assert (bars[0]["Nilo"]["stamina"].before, bars[0]["Nilo"]["stamina"].value) == (50, 40)
    assert bars[1]["Mavi"]["stamina"].before == 50
    assert bars[2]["Nilo"]["stamina"].before == game.turns[1].meters["Nilo"]["stamina"]


def test_shots_and_turns_belong_together(tmp_path):
    with pytest.raises(ValueError, match="1 shots for 2 turns"):
        storyboard(saved_game(tmp_path, 2), shots(1))


def test_long_and_foreign_text_keeps_the_layout(tmp_path):
    long = Instruction(("A" * 90, "尼洛"), "walk " * 60, "é" * 120)
    page = storyboard(saved_game(tmp_path, 2, long), shots(2, 9), VOCABULARY)
    assert page.width == 1382


@pytest.fixture
def no_fonts(monkeypatch):
    monkeypatch.setattr("animegamer.fonts.installed", lambda: [])


def test_text_without_a_font_is_given_by_canonical_names(no_fonts, tmp_path):
    fonts = Fonts()
    assert fonts.covers("gently dance, 50 %") and not fonts.covers("夜晚的小镇")
    assert VOCABULARY.romanised("夜晚的小镇") == "night town"
    assert VOCABULARY.romanised("轻轻地跳舞") == "gently dance"
    assert fonts.without_missing("夜晚") == "(no font for this text)"
    chinese = Instruction(("尼洛",), "轻轻地跳舞", "夜晚的小镇")
    english = Instruction(("Nilo",), "gently dance", "night town")
    english_page = storyboard(saved_game(tmp_path, 1, english), shots(1, 9))
    vocabulary = Vocabulary(
        {"Nilo": ("Nilo", "尼洛")},
        VOCABULARY.places,
        VOCABULARY.motions,
        VOCABULARY.adverbs,
        VOCABULARY.times,
    )
    chinese_page = storyboard(saved_game(tmp_path, 1, chinese), shots(1, 9), vocabulary)
    assert np.array_equal(np.asarray(english_page), np.asarray(chinese_page))


def test_the_first_font_that_has_all_characters_is_taken(tmp_path):
    own = ImageFont.load_default(20)
    fonts = Fonts([tmp_path / "missing.ttf"])
    assert fonts.font("Nilo", 20).getname() == own.getname()
    assert fonts.font("尼洛", 20).getname() == own.getname()  # none has it: still a font


def test_text_is_cut_and_wrapped_to_its_room():
    font = ImageFont.load_default(20)
    assert cut("Nilo", font, 200) == "Nilo"
    short = cut("a very long instruction", font, 100)
    assert short.endswith("...") and font.getlength(short) <= 100
    lines = wrap("walk through the town and the forest", font, 130, 2)
    assert len(lines) == 2 and all(font.getlength(line) <= 130 for line in lines)
    assert lines[0] == "walk through" and lines[1].endswith("...")
    assert len(wrap("夜" * 50, font, 100, 3)) == 3
    assert wrap("", font, 100, 2) == []
