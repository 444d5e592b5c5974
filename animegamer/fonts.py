"""Fonts for the storyboard: Pillow's own for plain Latin, the machine's for the rest.

None is shipped: a font with Chinese and Japanese is larger than our tiny model.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import ImageFont

_FOLDERS = (
    "~/.fonts",
    "~/.local/share/fonts",
    "/usr/local/share/fonts",
    "/usr/share/fonts",
    "~/Library/Fonts",
    "/Library/Fonts",
    "/System/Library/Fonts",
    "C:/Windows/Fonts",
)
# Beginnings of file names, best first: wide coverage of Chinese and Japanese, then of Latin.
_FAMILIES = (
    "NotoSansCJK",
    "NotoSansJP",
    "NotoSansSC",
    "NotoSansCJKjp",
    "SourceHanSans",
    "HiraginoSans",
    "Hiragino Sans",
    "ヒラギノ角ゴ",
    "PingFang",
    "STHeiti",
    "YuGoth",
    "meiryo",
    "msyh",
    "msgothic",
    "simhei",
    "wqy-",
    "ipag",
    "IPAexGothic",
    "TakaoPGothic",
    "VL-PGothic",
    "DroidSansFallback",
    "unifont",
    "ArialUnicode",
    "Arial Unicode",
    "NotoSans-",
    "DejaVuSans",
    "arial",
)
_ENDINGS = (".ttf", ".ttc", ".otf")


class Fonts:
    """Picks, for a text, the first font that has all its characters."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self.files = installed() if files is None else files
        self._loaded: dict[tuple[Path | None, float], Any] = {}

    def font(self, text: str, size: float) -> Any:
        """The font of a text, in pixels; Pillow's own where none has all of it."""
        for file in (None, *self.files):
            font = self._load(file, size)
            if font is not None and _covers(font, text):
                return font
        return self._load(None, size)

    def covers(self, text: str) -> bool:
        """Whether some font has every character of the text."""
        return any(
            font is not None and _covers(font, text)
            for font in (self._load(file, 16) for file in (None, *self.files))
        )

    def without_missing(self, text: str) -> str:
        """The characters that Pillow's own font has; says so where nothing is left."""
        font = self._load(None, 16)
        return "".join(c for c in text if _covers(font, c)).strip() or "(no font for this text)"

    def _load(self, file: Path | None, size: float) -> Any:
        if (file, size) not in self._loaded:
            try:
                font = (
                    ImageFont.load_default(size)
                    if file is None
                    else ImageFont.truetype(str(file), size)
                )
            except OSError:
                font = None
            self._loaded[file, size] = font
        return self._loaded[file, size]


def installed() -> list[Path]:
    """Font files of the machine that are worth trying, best first."""
    found: dict[str, list[Path]] = {family.lower(): [] for family in _FAMILIES}
    for folder in _FOLDERS:
        for where, _, names in os.walk(Path(folder).expanduser()):
            for name in sorted(names):
                if not name.lower().endswith(_ENDINGS):
                    continue
                family = next((f for f in found if name.lower().startswith(f)), None)
                if family is not None:
                    found[family].append(Path(where) / name)
    # The plain face of a family has the shortest name, but for NotoSans-Regular.
    return [
        min(files, key=lambda f: ("regular" not in f.stem.lower(), len(f.stem), f.stem))
        for files in found.values()
        if files
    ]


def _covers(font: Any, text: str) -> bool:
    return all(c.isspace() or _has(font, c) for c in text)


@lru_cache(maxsize=4096)
def _has(font: Any, character: str) -> bool:
    """Whether a font draws something else than its sign for a missing character."""
    return _ink(font, character) != _ink(font, "\U0010fffe")


def _ink(font: Any, character: str) -> tuple[Any, bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def cut(text: str, font: Any, room: float) -> str:
    """One line of text, with an ellipsis where it is longer than ``room`` pixels."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text.rstrip() + "..."


def wrap(text: str, font: Any, room: float, lines: int) -> list[str]:
    """Up to ``lines`` lines: breaks at spaces, and anywhere in text without them."""
    done: list[str] = []
    rest = text.strip()
    while rest and len(done) < lines - 1 and font.getlength(rest) > room:
        fits = range(len(rest), 1, -1)
        end = next((n for n in fits if font.getlength(rest[:n]) <= room), 1)
        space = rest.rfind(" ", 1, end + 1)
        end = space if space > 0 else end
        done.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return [*done, cut(rest, font, room)] if rest else done
