"""The names a checkpoint was trained on: ``vocabulary.json`` beside its weights.

    {"characters": {"nilo": {"en": "Nilo", "zh": "尼洛", "ja": "ニロ"}},
     "places": {"town": {"en": ["town", "town street"], ...}}, "motions": {...},
     "adverbs": {...}, "times": {...}}

Every kind may be absent. A spelling may be a string or a list of strings. The language of
instructions is open, so that a name that is not here is only worth a hint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from animegamer.game import Instruction

Names = dict[str, tuple[str, ...]]
"""Canonical id to all spellings."""


class VocabularyError(ValueError):
    """A vocabulary file that does not follow the format."""


@dataclass(frozen=True)
class Vocabulary:
    """Known names by kind; empty where a checkpoint ships none."""

    characters: Names = field(default_factory=dict)
    places: Names = field(default_factory=dict)
    motions: Names = field(default_factory=dict)
    adverbs: Names = field(default_factory=dict)
    times: Names = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        """Reads ``vocabulary.json``; a missing file gives the empty vocabulary.

        Raises:
            VocabularyError: names the file and what was expected.
        """
        path = Path(path)
        if not path.is_file():
            return cls()
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            kinds = {
                kind: {
                    str(name): _all_spellings(str(name), by_language)
                    for name, by_language in tree.get(kind, {}).items()
                }
                for kind in (each.name for each in fields(cls))
            }
        except (ValueError, AttributeError, TypeError) as error:
            raise VocabularyError(
                f"{path}: {error}; expected {{'characters': {{id: {{'en': name}}}}, ...}}"
            ) from None
        return cls(**kinds)

    def character(self, name: str) -> str:
        """The canonical id of a character, or the name in small letters where it is unknown."""
        return _exactly(name, self.characters) or " ".join(name.casefold().split())

    def place(self, background: str) -> str | None:
        """The canonical id of the place named in a background, or None."""
        return next(iter(_within(background, self.places)), None)

    def unknown(self, instructions: Iterable[Instruction]) -> list[str]:
        """Characters and backgrounds that the checkpoint was not trained on, each once."""
        found: dict[str, None] = {}
        for instruction in instructions:
            for name in instruction.characters:
                if self.characters and _exactly(name, self.characters) is None:
                    found.setdefault(name)
            if self.places and self.place(instruction.background) is None:
                found.setdefault(instruction.background)
        return list(found)

    def note(self, instructions: Iterable[Instruction]) -> str:
        """A line for the player where instructions name what is unknown, else the empty text."""
        unknown = self.unknown(instructions)
        known = [
            spellings[0] for kind in (self.characters, self.places) for spellings in kind.values()
        ]
        line = (
            f"note: unknown: {', '.join(unknown)} (open language is allowed; the checkpoint was "
            f"trained on: {', '.join(known)})\n"
        )
        return line if unknown else ""

    def romanised(self, text: str) -> str:
        """What is known of a text, by canonical ids: for a page whose fonts lack its script."""
        kinds = (self.characters, self.adverbs, self.motions, self.times, self.places)
        found = [name for kind in kinds for name in _within(text, kind)[:1]]
        return " ".join(dict.fromkeys(found))


def _all_spellings(name: str, by_language: object) -> tuple[str, ...]:
    """English first, for display, then the id and the other languages."""
    english = by_language.get("en", []) if isinstance(by_language, dict) else []
    return tuple(dict.fromkeys([*_spellings(english), name, *_spellings(by_language)]))


def _spellings(by_language: object) -> list[str]:
    if isinstance(by_language, str):
        return [by_language]
    values = by_language.values() if isinstance(by_language, dict) else by_language
    return [spelling for value in values for spelling in _spellings(value)]  # type: ignore[attr-defined]


def _exactly(name: str, names: Names) -> str | None:
    wanted = " ".join(name.casefold().split())
    for known, spellings in names.items():
        if any(spelling.casefold() == wanted for spelling in spellings):
            return known
    return None


def _within(text: str, names: Names) -> list[str]:
    """Ids whose spellings occur in a text, longest spelling first."""
    folded = text.casefold()
    hits = []
    for known, spellings in names.items():
        sizes = [len(spelling) for spelling in spellings if spelling.casefold() in folded]
        if sizes:
            hits.append((-max(sizes), folded.find(known), known))
    return [known for *_, known in sorted(hits)]
