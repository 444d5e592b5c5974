"""Every word of the world's instructions: canonical name -> English, Chinese, Japanese.

The first English variant of a table is the canonical one. Phrases are put together by
``motion_phrase`` and ``background_phrase``; evaluation and demos may use the tables directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from animegamer.game import Instruction

LANGUAGES: tuple[str, ...] = ("en", "zh", "ja")

NAMES: dict[str, dict[str, str]] = {
    "Nilo": {"zh": "尼洛", "ja": "ニロ"},
    "Mavi": {"zh": "玛薇", "ja": "マヴィ"},
    "Juno": {"zh": "朱诺", "ja": "ジュノ"},
    "Orin": {"zh": "奥林", "ja": "オリン"},
    "Pela": {"zh": "佩拉", "ja": "ペラ"},
    "Bruk": {"zh": "布鲁克", "ja": "ブルク"},
}

# Intensity -> adverbs.
ADVERBS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "en": ("gently", "softly", "tenderly"),
        "zh": ("轻轻地", "温柔地"),
        "ja": ("そっと", "優しく"),
    },
    2: {
        "en": ("slowly", "calmly", "lazily"),
        "zh": ("慢慢地", "缓缓地"),
        "ja": ("ゆっくり", "のんびり"),
    },
    3: {
        "en": ("steadily", "evenly", "smoothly"),
        "zh": ("平稳地", "稳稳地"),
        "ja": ("着実に", "安定して"),
    },
    4: {
        "en": ("quickly", "eagerly", "briskly"),
        "zh": ("快速地", "飞快地"),
        "ja": ("素早く", "てきぱきと"),
    },
    5: {
        "en": ("furiously", "wildly", "frantically"),
        "zh": ("疯狂地", "猛烈地"),
        "ja": ("激しく", "猛烈に"),
    },
}

# Motion -> wordings for one character; ``TOGETHER`` holds those for two.
VERBS: dict[str, dict[str, tuple[str, ...]]] = {
    "walk": {"en": ("walk", "stroll"), "zh": ("走路",), "ja": ("歩く",)},
    "run": {"en": ("run", "sprint"), "zh": ("跑步",), "ja": ("走る",)},
    "jump": {"en": ("jump", "hop"), "zh": ("跳跃",), "ja": ("跳ぶ",)},
    "sit": {"en": ("sit", "sit on a box"), "zh": ("坐着",), "ja": ("座る",)},
    "lie down": {"en": ("lie down", "lie on a mat"), "zh": ("躺下",), "ja": ("横になる",)},
    "wave": {"en": ("wave", "wave a hand"), "zh": ("挥手",), "ja": ("手を振る",)},
    "talk": {"en": ("talk", "speak"), "zh": ("说话",), "ja": ("話す",)},
    "read": {"en": ("read", "read a book"), "zh": ("看书",), "ja": ("本を読む",)},
    "dance": {"en": ("dance", "dance to music"), "zh": ("跳舞",), "ja": ("踊る",)},
    "eat": {"en": ("eat", "eat a rice ball"), "zh": ("吃饭团",), "ja": ("おにぎりを食べる",)},
    "fly": {"en": ("fly", "fly on a kite"), "zh": ("乘风筝飞行",), "ja": ("凧で飛ぶ",)},
    "drive": {"en": ("drive", "drive a car"), "zh": ("开车",), "ja": ("車を運転する",)},
}
TOGETHER: dict[str, dict[str, tuple[str, ...]]] = {
    "talk": {
        "en": ("talk to each other", "chat together"),
        "zh": ("互相说话",),
        "ja": ("話し合う",),
    },
    "dance": {"en": ("dance together",), "zh": ("一起跳舞",), "ja": ("一緒に踊る",)},
    "wave": {"en": ("wave at each other",), "zh": ("互相挥手",), "ja": ("手を振り合う",)},
    "eat": {"en": ("eat together",), "zh": ("一起吃饭团",), "ja": ("一緒におにぎりを食べる",)},
}

PLACE_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "meadow": {"en": ("meadow", "flower meadow"), "zh": ("草地",), "ja": ("草原",)},
    "forest": {"en": ("forest", "woods"), "zh": ("森林",), "ja": ("森",)},
    "beach": {"en": ("beach", "seaside"), "zh": ("海滩",), "ja": ("浜辺",)},
    "town": {"en": ("town", "town street"), "zh": ("小镇",), "ja": ("町",)},
    "room": {"en": ("room", "cosy room"), "zh": ("房间",), "ja": ("部屋",)},
    "mountain": {"en": ("mountain", "mountains"), "zh": ("高山",), "ja": ("山",)},
    "snow field": {"en": ("snow field", "snowy field"), "zh": ("雪原",), "ja": ("雪原",)},
    "castle": {"en": ("castle", "old castle"), "zh": ("城堡",), "ja": ("城",)},
}

# Time of day -> patterns around the place's name.
TIME_PATTERNS: dict[str, dict[str, tuple[str, ...]]] = {
    "day": {"en": ("day {}", "{} by day", "sunny {}"), "zh": ("白天的{}",), "ja": ("昼の{}",)},
    "evening": {
        "en": ("evening {}", "{} at dusk", "{} in the evening"),
        "zh": ("傍晚的{}",),
        "ja": ("夕方の{}",),
    },
    "night": {"en": ("night {}", "{} at night", "dark {}"), "zh": ("夜晚的{}",), "ja": ("夜の{}",)},
}


def _pick(variants: Sequence[str], choice: int) -> str:
    return variants[choice % len(variants)]


def character_names(characters: Sequence[str], language: str = "en") -> tuple[str, ...]:
    """The names of characters as they are written in a language."""
    if language == "en":
        return tuple(characters)
    return tuple(NAMES[name][language] for name in characters)


def motion_phrase(
    motion: str, intensity: int, language: str = "en", together: bool = False, choice: int = 0
) -> str:
    """Words for a motion with its intensity.

    Args:
        motion: Canonical motion.
        intensity: 1 to 5.
        language: en, zh or ja.
        together: Two characters do it; some motions then have words of their own.
        choice: 0 gives the canonical words, other numbers other wordings.

    Returns:
        A phrase such as "gently wave", "wave softly", "轻轻地挥手", "そっと手を振る".
    """
    adverb = _pick(ADVERBS[intensity][language], choice)
    verbs = VERBS[motion][language]
    if together and motion in TOGETHER and (choice or language != "en"):
        verbs = TOGETHER[motion][language]
    verb = _pick(verbs, choice // 3)
    if language == "en" and choice % 2:
        return f"{verb} {adverb}"
    return f"{adverb} {verb}" if language == "en" else f"{adverb}{verb}"


def background_phrase(place: str, time: str, language: str = "en", choice: int = 0) -> str:
    """Words for a place at a time of day, canonical ("night town") for ``choice`` 0."""
    name = _pick(PLACE_NAMES[place][language], choice // 3)
    return _pick(TIME_PATTERNS[time][language], choice).format(name)


def action_text(motion: str, intensity: int) -> str:
    """The canonical English action of a shot, whatever the instruction's language."""
    return motion_phrase(motion, intensity)


def instruction(
    characters: Sequence[str],
    motion: str,
    intensity: int,
    place: str,
    time: str,
    language: str = "en",
    choice: int = 0,
) -> Instruction:
    """A player's instruction for a shot.

    Args:
        characters: One or two canonical names, in order.
        motion: Canonical motion.
        intensity: 1 to 5.
        place: Canonical place.
        time: day, evening or night.
        language: en, zh or ja.
        choice: 0 gives canonical words, any other number varied ones.
    """
    return Instruction(
        characters=character_names(characters, language),
        motion=motion_phrase(motion, intensity, language, len(characters) > 1, choice),
        background=background_phrase(place, time, language, choice),
    )
