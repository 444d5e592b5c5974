"""The world's names in the format of a checkpoint's ``vocabulary.json``."""

from __future__ import annotations

from data_pipeline.builtin_world import words


def vocabulary() -> dict[str, dict[str, dict[str, object]]]:
    """Every name by kind, canonical id and language (see ``animegamer.vocabulary``)."""
    motions = {
        motion: {
            language: [*verbs, *words.TOGETHER.get(motion, {}).get(language, ())]
            for language, verbs in by_language.items()
        }
        for motion, by_language in words.VERBS.items()
    }
    times = {
        time: {
            language: [pattern.replace("{}", "").strip() for pattern in patterns]
            for language, patterns in by_language.items()
        }
        for time, by_language in words.TIME_PATTERNS.items()
    }
    return {
        "characters": {name: {"en": name, **others} for name, others in words.NAMES.items()},
        "places": {place: dict(names) for place, names in words.PLACE_NAMES.items()},
        "motions": {motion: dict(verbs) for motion, verbs in motions.items()},
        "adverbs": {adverbs["en"][0]: dict(adverbs) for adverbs in words.ADVERBS.values()},
        "times": {time: dict(patterns) for time, patterns in times.items()},
    }
