"""A played game on one page: per turn three frames, the instruction, motion level and meters.

No torch and no video here: frames come as arrays. Fonts are those of the machine; Latin text has
Pillow's own, and a script that no font here can show is given by the canonical names in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from animegamer.fonts import Fonts, cut, wrap
from animegamer.game import STATE_NAMES
from animegamer.saved_game import SavedGame, SavedTurn
from animegamer.vocabulary import Vocabulary

Color = tuple[int, int, int]

_PAPER: Color = (249, 246, 239)
_CARD: Color = (255, 255, 255)
_EDGE: Color = (228, 221, 208)
_TRACK: Color = (238, 234, 226)
_INK: Color = (44, 46, 66)
_SOFT: Color = (128, 126, 138)
_MOTION: Color = (110, 86, 207)
_METERS: dict[str, Color] = {
    "stamina": (226, 84, 79),
    "social": (48, 129, 208),
    "entertainment": (236, 160, 24),
}

_SHARP = 2  # everything but pictures is drawn at this scale and reduced
_BOLD = 0.04  # stroke of bold text, as a share of its size
_MARGIN, _GAP, _PAD = 40, 22, 18
_CARD_WIDTH = 640
_FRAMES = 3
_FRAME_GAP = 8
_METERS_WIDTH = 236
_BLOCK = 78  # height of one character's meters
_CHART = 190


@dataclass(frozen=True)
class _Bar:
    """A meter after a turn, and where it stood before."""

    value: int
    before: int


def story_frames(shot: np.ndarray) -> np.ndarray:
    """First, middle and last frame of a shot: uint8 (F, H, W, 3) to (3, H, W, 3)."""
    return shot[[0, len(shot) // 2, len(shot) - 1]]


def storyboard(
    game: SavedGame, shots: Sequence[np.ndarray], vocabulary: Vocabulary | None = None
) -> Image.Image:
    """Draws the page.

    Args:
        game: the played game.
        shots: per turn, uint8 frames (3, H, W, 3) as ``story_frames`` picks them.
        vocabulary: known names, for text in a script without a font.

    Raises:
        ValueError: if there is another number of shots than of turns, or none.
    """
    if not game.turns or len(shots) != len(game.turns):
        raise ValueError(
            f"{len(shots)} shots for {len(game.turns)} turns, expected one each and at least one"
        )
    page = _Page(game, Fonts(), vocabulary or Vocabulary())
    columns = 1 if len(shots) == 1 else 2 if len(shots) <= 12 else 4
    numbers = range(1, len(shots) + 1)
    rows = [numbers[start : start + columns] for start in range(0, len(shots), columns)]
    pictures = page.picture_size(shots[0])
    heights = [max(page.card_height(number, pictures) for number in row) for row in rows]
    width = 2 * _MARGIN + columns * _CARD_WIDTH + (columns - 1) * _GAP
    header, footer = page.header(width - 2 * _MARGIN), page.charts(width - 2 * _MARGIN)
    height = (
        2 * _MARGIN
        + header.height
        + sum(heights)
        + len(heights) * _GAP
        + (footer.height + _GAP if footer else 0)
    )
    canvas = Image.new("RGB", (width, height), _PAPER)
    canvas.paste(header, (_MARGIN, _MARGIN))
    y = _MARGIN + header.height + _GAP
    for row, tall in zip(rows, heights, strict=True):
        for column, number in enumerate(row):
            card = page.card(number, shots[number - 1], pictures, tall)
            canvas.paste(card, (_MARGIN + column * (_CARD_WIDTH + _GAP), y))
        y += tall + _GAP
    if footer:
        canvas.paste(footer, (_MARGIN, y))
    return canvas


class _Page:
    """Draws the parts of one game's page."""

    def __init__(self, game: SavedGame, fonts: Fonts, vocabulary: Vocabulary) -> None:
        self.game, self.fonts, self.vocabulary = game, fonts, vocabulary
        self.bars = _bars(game)

    def readable(self, text: str) -> str:
        """The text, or what can be shown of it with the fonts at hand."""
        if self.fonts.covers(text):
            return text
        return self.vocabulary.romanised(text) or self.fonts.without_missing(text)

    def header(self, width: int) -> Image.Image:
        """Title, settings, colour legend, and the opening picture at the right."""
        opening, settings = self.game.opening_frame, self.game.settings
        height = 132
        sheet = _Sheet(width, height, _PAPER, self.fonts)
        characters = ", ".join(self.readable(name) for name in self.characters())
        title = self.readable(self.game.name).replace("_", " ").capitalize()
        sheet.text(0, 0, title, 44, _INK, bold=True)
        room = width - (240 if opening is not None else 0)
        turns = f"{len(self.game.turns)} turn{'s' if len(self.game.turns) != 1 else ''}"
        sheet.text(0, 60, f"{turns} with {characters}", 21, _INK, room=room)
        past = f"window {settings.get('window')}, {settings.get('history')} history"
        sheet.text(0, 90, f"AnimeGamer   seed {settings.get('seed')}, {past}", 16, _SOFT)
        x = 0.0
        for name in STATE_NAMES:
            sheet.box(x, 120, 12, 12, _METERS[name], 3)
            x = sheet.text(x + 18, 116, name, 16, _INK) + 22
        sheet.level(x, 119, 3, 13)
        sheet.text(x + 48, 116, "motion level 1 to 5", 16, _INK)
        image = sheet.reduced()
        if opening is not None:
            box = (round(height * opening.shape[1] / opening.shape[0]), height)
            _paste(image, opening, width - box[0], 0, box)
            label = _Sheet(64, height, _PAPER, self.fonts)
            label.text(64, height - 22, "opening", 15, _SOFT, anchor="ra")
            image.paste(label.reduced(), (width - box[0] - 74, 0))
        return image

    def picture_size(self, frames: np.ndarray) -> tuple[int, int]:
        """Width and height of a frame on a card."""
        wide = (_CARD_WIDTH - 2 * _PAD - (_FRAMES - 1) * _FRAME_GAP) // _FRAMES
        return wide, round(wide * frames.shape[1] / frames.shape[2])

    def card_height(self, number: int, pictures: tuple[int, int]) -> int:
        """How high a turn's card must be."""
        turn = self.game.turns[number - 1]
        sheet = _Sheet(_CARD_WIDTH, 8, _PAPER, self.fonts)
        text = self._instruction(sheet, number, turn, 0)
        return 2 * _PAD + pictures[1] + 14 + round(max(text, _BLOCK * len(turn.meters) - 8))

    def card(
        self, number: int, frames: np.ndarray, pictures: tuple[int, int], height: int
    ) -> Image.Image:
        """One turn."""
        turn, top = self.game.turns[number - 1], _PAD + pictures[1] + 14
        sheet = _Sheet(_CARD_WIDTH, height, _PAPER, self.fonts)
        sheet.box(0, 0, _CARD_WIDTH, height, _CARD, 14, _EDGE)
        self._instruction(sheet, number, turn, top)
        for order, name in enumerate(turn.meters):
            x, y = _CARD_WIDTH - _PAD - _METERS_WIDTH, top + _BLOCK * order
            sheet.text(x, y, self.readable(name), 16, _INK, bold=True, room=_METERS_WIDTH)
            for line, state in enumerate(STATE_NAMES):
                bar = self.bars[number - 1][name][state]
                self._bar(sheet, x, y + 24 + 16 * line, bar, _METERS[state])
        image = sheet.reduced()
        for order, frame in enumerate(frames):
            _paste(image, frame, _PAD + order * (pictures[0] + _FRAME_GAP), _PAD, pictures)
        return image

    def _instruction(self, sheet: _Sheet, number: int, turn: SavedTurn, top: int) -> float:
        """Number, motion level and what was asked; returns where it ends."""
        room = _CARD_WIDTH - 3 * _PAD - _METERS_WIDTH - 54
        asked, x = turn.instruction, _PAD + 54
        sheet.box(_PAD, top, 40, 40, _INK, 10)
        sheet.text(_PAD + 20, top + 20, str(number), 20, _CARD, bold=True, anchor="mm")
        sheet.level(_PAD + 1, top + 52, turn.motion_scope.level, 18)
        y = float(top)
        for text, size, color, bold, lines in (
            (" & ".join(map(self.readable, asked.characters)), 19, _INK, True, 2),
            (self.readable(asked.motion), 18, _INK, False, 3),
            (self.readable(asked.background), 16, _SOFT, False, 2),
        ):
            y = sheet.paragraph(x, y, text, size, color, room, lines, bold) + 3
        return max(y, top + 70)

    def _bar(self, sheet: _Sheet, x: float, y: float, bar: _Bar, color: Color) -> None:
        """A meter: what stays in full colour, what was won outlined darker, what was lost pale."""
        room = _METERS_WIDTH - 74
        scale = room / self.game.rules.maximum
        low, high = min(bar.before, bar.value), max(bar.before, bar.value)
        sheet.box(x, y, room, 11, _TRACK, 5)
        if high:
            changed = _mix(color, _INK, 0.45) if bar.value > bar.before else _mix(color, _CARD, 0.7)
            sheet.box(x, y, max(high * scale, 11), 11, changed, 5)
        if low:
            sheet.box(x, y, max(low * scale, 11), 11, color, 5)
        delta = bar.value - bar.before
        sheet.text(x + room + 34, y - 4, str(bar.value), 15, _INK, anchor="ra")
        if delta:
            tone = _SOFT if delta < 0 else _mix(color, _INK, 0.45)
            sheet.text(
                x + room + 74, y - 4, f"{delta:+d}".replace("-", "\u2013"), 15, tone, anchor="ra"
            )

    def charts(self, width: int) -> Image.Image | None:
        """The meters over the whole game, one chart for each character; None for one turn."""
        names = self.characters()[:6]
        if len(self.game.turns) < 2:
            return None
        each = (width - (len(names) - 1) * _GAP) / len(names)
        sheet = _Sheet(width, _CHART, _PAPER, self.fonts)
        for order, name in enumerate(names):
            x = order * (each + _GAP)
            sheet.box(x, 0, each, _CHART, _CARD, 14, _EDGE)
            sheet.text(x + _PAD, 12, self.readable(name), 18, _INK, bold=True, room=each - 36)
            self._chart(sheet, name, x + _PAD + 28, 50, each - 2 * _PAD - 34, _CHART - 80)
        return sheet.reduced()

    def _chart(
        self, sheet: _Sheet, name: str, x: float, y: float, wide: float, tall: float
    ) -> None:
        rules, turns = self.game.rules, len(self.game.turns)
        for value in (0, rules.maximum // 2, rules.maximum):
            level = y + tall * (1 - value / rules.maximum)
            sheet.line([(x, level), (x + wide, level)], 1, _TRACK)
            sheet.text(x - 8, level, str(value), 12, _SOFT, anchor="rm")
        every = max(1, round(turns / max(1, wide // 34)))
        for turn in range(every, turns + 1, every):
            sheet.text(x + wide * turn / turns, y + tall + 6, str(turn), 12, _SOFT, anchor="ma")
        for offset, state in enumerate(STATE_NAMES):
            values, value = [rules.start], rules.start
            for bars in self.bars:
                value = bars[name][state].value if name in bars else value
                values.append(value)
            shift = (offset - 1) * 1.5  # equal values stay apart
            points = [
                (x + wide * turn / turns, y + tall * (1 - v / rules.maximum) + shift)
                for turn, v in enumerate(values)
            ]
            sheet.line(points, 2.5, _METERS[state])
            for point, bars in zip(points[1:], self.bars, strict=True):
                if name in bars and turns <= 40:
                    sheet.box(point[0] - 4, point[1] - 4, 8, 8, _METERS[state], 4)

    def characters(self) -> list[str]:
        """All characters, in the order in which they come in."""
        return list(dict.fromkeys(name for turn in self.game.turns for name in turn.meters))


class _Sheet:
    """A part of the page, drawn larger and then reduced, so that edges are smooth."""

    def __init__(self, width: float, height: float, color: Color, fonts: Fonts) -> None:
        size = (round(width) * _SHARP, round(height) * _SHARP)
        self.image = Image.new("RGB", size, color)
        self.draw = ImageDraw.Draw(self.image)
        self.fonts = fonts

    def reduced(self) -> Image.Image:
        return self.image.reduce(_SHARP)

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        tall: float,
        fill: Color,
        radius: float,
        edge: Color | None = None,
    ) -> None:
        corners = [v * _SHARP for v in (x, y, x + wide, y + tall)]
        corners[2:] = [corners[2] - 1, corners[3] - 1]
        self.draw.rounded_rectangle(corners, radius * _SHARP, fill, edge, _SHARP if edge else 0)

    def line(self, points: list[tuple[float, float]], width: float, fill: Color) -> None:
        scaled = [(x * _SHARP, y * _SHARP) for x, y in points]
        self.draw.line(scaled, fill, round(width * _SHARP), joint="curve")

    def level(self, x: float, y: float, level: int, tall: float) -> None:
        """Motion level as five rising columns."""
        for step in range(1, 6):
            part = tall * (0.3 + 0.14 * step)
            self.box(
                x + (step - 1) * 8,
                y + tall - part,
                6,
                part,
                _MOTION if step <= level else _TRACK,
                2,
            )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        fill: Color,
        *,
        bold: bool = False,
        anchor: str = "la",
        room: float | None = None,
    ) -> float:
        """Writes one line, cut with an ellipsis to ``room``; returns where it ends."""
        font = self.fonts.font(text, size * _SHARP)
        if room is not None:
            text = cut(text, font, room * _SHARP)
        stroke = size * _BOLD if bold else 0
        self.draw.text((x * _SHARP, y * _SHARP), text, fill, font, anchor, stroke_width=stroke)
        return x + font.getlength(text) / _SHARP

    def paragraph(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        fill: Color,
        room: float,
        lines: int,
        bold: bool,
    ) -> float:
        """Writes up to ``lines`` lines; returns where the next one would stand."""
        font, stroke = self.fonts.font(text, size * _SHARP), size * _BOLD if bold else 0
        for line in wrap(text, font, room * _SHARP, lines):
            at = (x * _SHARP, y * _SHARP)
            self.draw.text(at, line, fill, font, "la", stroke_width=stroke)
            y += size * 1.28
        return y


def _bars(game: SavedGame) -> list[dict[str, dict[str, _Bar]]]:
    """Per turn, character and state: the meter and what it was before."""
    last: dict[str, dict[str, int]] = {}
    bars = []
    for turn in game.turns:
        now = {}
        for name, meters in turn.meters.items():
            before = last.get(name, dict.fromkeys(STATE_NAMES, game.rules.start))
            now[name] = {state: _Bar(meters[state], before[state]) for state in STATE_NAMES}
            last[name] = meters
        bars.append(now)
    return bars


def _mix(color: Color, other: Color, share: float) -> Color:
    red, green, blue = (
        round(c * (1 - share) + o * share) for c, o in zip(color, other, strict=True)
    )
    return red, green, blue


def _paste(page: Image.Image, frame: np.ndarray, x: int, y: int, size: tuple[int, int]) -> None:
    """Pastes a picture with rounded corners."""
    picture = Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)
    mask = Image.new("L", (size[0] * 4, size[1] * 4))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, mask.width - 1, mask.height - 1), 32, 255)
    page.paste(picture, (x, y), mask.reduce(4))
