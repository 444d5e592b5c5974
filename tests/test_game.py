"""Instructions as people type them, character states, motion scope, meters, history."""

import dataclasses
import re
import tracemalloc

import numpy as np
import pytest

from animegamer.game import (
    MAX_INSTRUCTION_LENGTH,
    CharacterState,
    GameState,
    History,
    Instruction,
    InstructionError,
    MeterRules,
    Meters,
    MotionScope,
    Turn,
    read_script,
    visible_turns,
)

LINE = "Character: Nilo and Mavi; Motion: gently talk to each other; Background: night town."
EXPECTED = Instruction(("Nilo", "Mavi"), "gently talk to each other", "night town")


def who(characters):
    return Instruction.parse(f"Character: {characters}; Motion: wave; Background: town.").characters


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        LINE.rstrip("."),
        f"  {LINE}  \n",
        LINE + ";",
        LINE.replace(";", "；").replace(":", "："),
        "MOTION: gently  talk to\teach other;background:night town;  Characters : Nilo,Mavi",
        "人物：Nilo和Mavi；动作：gently talk to each other；背景：night town。",
    ],
)
def test_parse(line):
    assert Instruction.parse(line) == EXPECTED


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "角色：尼洛和玛维；动作：轻轻地交谈；背景：夜晚的小镇。",
            Instruction(("尼洛", "玛维"), "轻轻地交谈", "夜晚的小镇"),
        ),
        (
            "角色: 尼洛、玛维与朱诺; 動作: 跑步; 背景: 海邊",
            Instruction(("尼洛", "玛维", "朱诺"), "跑步", "海邊"),
        ),
        (
            "キャラクター：ニロとマヴィ；動き：静かに話す；背景：夜の町。",
            Instruction(("ニロ", "マヴィ"), "静かに話す", "夜の町"),
        ),
        (
            "登場人物：ニロ と さとみ；動作：走る；背景：海",
            Instruction(("ニロ", "さとみ"), "走る", "海"),
        ),
    ],
)
def test_chinese_and_japanese(line, expected):
    assert Instruction.parse(line) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("Ferdinand and Sandy", ("Ferdinand", "Sandy")),
        ("Andy and Brand and Orlando", ("Andy", "Brand", "Orlando")),
        ("Nilo, Mavi, and Juno", ("Nilo", "Mavi", "Juno")),
        ("Nilo & Mavi", ("Nilo", "Mavi")),
        ("Nilo AND Mavi", ("Nilo", "Mavi")),
        ("Nilo  and  the old man", ("Nilo", "the old man")),
        ("Jean-Luc and O'Neill", ("Jean-Luc", "O'Neill")),
        ("和子とニロ", ("和子", "ニロ")),
        ("さとみとニロ", ("さとみ", "ニロ")),
        ("さとみ、とおる", ("さとみ", "とおる")),
        ("Nilo and Nilo", ("Nilo",)),
        ("Nilo,", ("Nilo",)),
    ],
)
def test_names_are_split_between_words_only(names, expected):
    assert who(names) == expected


def test_colons_and_dots_inside_a_field():
    instruction = Instruction.parse(
        "Character: Dr. Nilo; Motion: say: good night; Background: room at 10:30."
    )
    assert instruction == Instruction(("Dr. Nilo",), "say: good night", "room at 10:30")
    assert Instruction.parse("背景：早上8：30的房间；动作：走；角色：尼洛").background == (
        "早上8：30的房间"
    )


def test_text_of_an_instruction_reads_back():
    assert str(EXPECTED) == LINE
    for line in (LINE, "角色：尼洛、玛维；动作：说：你好；背景：10:30 的房间。"):
        instruction = Instruction.parse(line)
        assert Instruction.parse(str(instruction)) == instruction


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no characters, no motion, no background in ''"),
        ("Nilo waves", "cannot read 'Nilo waves': expected 'Character:', 'Motion:' or"),
        ("Character: Nilo; Background: town", "no motion in"),
        ("Character: Nilo; Motion: ; Background: town", "no motion in"),
        ("Character: ,; Motion: wave; Background: town", "no character is named"),
        ("Character: Nilo; Motion: wave; Place: town", "cannot read 'Place: town'"),
        ("Character: Nilo; Motion: wave; Motion: run; Background: town", "'Motion' is given twice"),
        ("Character: Nilo; Motion: a\x00b; Background: town", "control character"),
        ("Character: Nilo; Motion: a\ud800b; Background: town", "control character"),
        ("Character: Nilo; Motion: a\nb; Background: town", "control character"),
        (LINE + "x" * MAX_INSTRUCTION_LENGTH, f"at most {MAX_INSTRUCTION_LENGTH} are read"),
    ],
)
def test_line_that_cannot_be_read(line, message):
    with pytest.raises(InstructionError, match=re.escape(message)):
        Instruction.parse(line)


def test_script(write):
    path = write("game.txt", f"# a game\n\n{LINE}\r\n   \n  # more\n{LINE}")
    script = read_script(path)
    assert script.instructions == (EXPECTED, EXPECTED)
    assert script.opening is None


def test_script_with_byte_order_mark_and_other_line_ends(write):
    path = write("game.txt", b"\xef\xbb\xbf" + LINE.encode() + b"\r" + LINE.encode() + b"\r\n")
    assert read_script(path).instructions == (EXPECTED, EXPECTED)


def test_bad_line_names_file_and_line(write):
    path = write("game.txt", f"{LINE}\n\n# note\nCharacter: Nilo\n{LINE}")
    with pytest.raises(InstructionError, match=r"game\.txt:4: no motion, no background in"):
        read_script(path)
    path = write("feed.txt", f"{LINE}\n{LINE}\f\u2028\n{LINE} x: y;\nnonsense")
    with pytest.raises(InstructionError, match=r"feed\.txt:4: cannot read 'nonsense'"):
        read_script(path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_not_utf8_names_the_line(write, mark):
    path = write("game.txt", mark + b"#\n" + "背景：町".encode("shift_jis"))
    with pytest.raises(InstructionError, match=r"game\.txt:2: not UTF-8 .*save the file as UTF-8"):
        read_script(path)
    path = write("utf16.txt", LINE.encode("utf-16"))
    with pytest.raises(InstructionError, match=r"utf16\.txt:1: not UTF-8"):
        read_script(path)


@pytest.mark.parametrize("content", ["", "\n\n", "# only a note\n", "\ufeff"])
def test_empty_script(write, content):
    with pytest.raises(InstructionError, match=r"game\.txt: holds no instruction; expected lines"):
        read_script(write("game.txt", content))


def test_no_such_script(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no instruction file .*gone\.txt"):
        read_script(tmp_path / "gone.txt")
    with pytest.raises(FileNotFoundError, match="no instruction file"):
        read_script(tmp_path)


def test_opening(write):
    picture = write("pictures/a: b.png", b"png")
    for line in ("Opening: pictures/a: b.png", " opening：pictures/a: b.png "):
        script = read_script(write("game.txt", f"# first\n{line}\n{LINE}"))
        assert script.opening == picture
        assert script.instructions == (EXPECTED,)


def test_opening_that_is_missing_late_or_double(write):
    write("a.png", b"png")
    with pytest.raises(FileNotFoundError, match=r"game\.txt:1: no opening picture .*gone\.png"):
        read_script(write("game.txt", f"Opening: gone.png\n{LINE}"))
    for lines in (f"{LINE}\nOpening: a.png", "Opening: a.png\nOpening: a.png"):
        with pytest.raises(InstructionError, match=r"game\.txt:2: 'Opening:' stands once, before"):
            read_script(write("game.txt", lines))


@pytest.mark.parametrize("value", [-6, 6, 1.0, True, None, "1", np.float32(1)])
@pytest.mark.parametrize("name", ["stamina", "social", "entertainment"])
def test_character_state_bounds(name, value):
    with pytest.raises(ValueError, match=f"{name} change is .*an integer from -5 to 5"):
        CharacterState(**{"stamina": 0, "social": 0, "entertainment": 0, name: value})


def test_character_state():
    assert CharacterState(-5, 0, 5).as_dict() == {"stamina": -5, "social": 0, "entertainment": 5}


def test_motion_scope_table():
    assert [MotionScope(level).scalar for level in range(1, 6)] == [0.5, 2.5, 10.0, 15.0, 40.0]
    assert [field.name for field in dataclasses.fields(MotionScope)] == ["level"]


@pytest.mark.parametrize("level", [0, 6, -1, True, 2.0, None, "3"])
def test_motion_scope_bounds(level):
    with pytest.raises(ValueError, match=r"motion level is .*an integer from 1 to 5"):
        MotionScope(level)


def test_meters():
    meters = Meters()
    assert meters.apply(["Nilo", "Mavi"], CharacterState(-2, 1, 3)) == {
        "Nilo": {"stamina": 40, "social": 55, "entertainment": 65},
        "Mavi": {"stamina": 40, "social": 55, "entertainment": 65},
    }
    # No change of stamina stays; no change of the others decays. Mavi is not there.
    assert meters.apply(["Nilo"], CharacterState(0, 0, 0)) == {
        "Nilo": {"stamina": 40, "social": 50, "entertainment": 60}
    }
    assert meters.values["Mavi"]["social"] == 55


def test_meters_stay_between_0_and_the_maximum():
    meters = Meters()
    for _ in range(120):
        full = meters.apply(["Nilo"], CharacterState(5, 5, 5))["Nilo"]
        empty = meters.apply(["Mavi"], CharacterState(-5, 0, -5))["Mavi"]
    assert set(full.values()) == {100} and set(empty.values()) == {0}


def test_meters_of_two_games_are_apart_and_answers_are_copies():
    first, second = Meters(), Meters()
    first.apply(["Nilo"], CharacterState(1, 1, 1))["Nilo"]["social"] = 7
    assert first.values["Nilo"]["social"] == 55
    assert second.values == {}


def test_meter_rules():
    meters = Meters(MeterRules(start=10, maximum=12, meter_step=1, idle_decay=3))
    assert meters.apply(["Nilo"], CharacterState(1, 4, 0))["Nilo"] == {
        "stamina": 11,
        "social": 12,
        "entertainment": 7,
    }


def turn(number, shot=None):
    state = GameState(MotionScope(1), CharacterState(0, 0, 0), s_a=number, shot=shot)
    return Turn(EXPECTED, state)


def seen(history):
    return [turn.state.s_a for turn in history.visible()]


@pytest.mark.parametrize(
    ("window", "sink", "expected"),
    [
        (1, 0, []),
        (1, 1, []),
        (2, 0, [9]),
        (2, 1, [9]),  # one place: the last turn, rather than the first
        (3, 0, [8, 9]),
        (3, 1, [0, 9]),
        (5, 0, [6, 7, 8, 9]),
        (5, 1, [0, 7, 8, 9]),
        (11, 1, list(range(10))),
        (99, 1, list(range(10))),
    ],
)
def test_window_counts_the_current_turn(window, sink, expected):
    history = History(window, sink)
    assert history.visible() == []
    for number in range(10):
        history.append(turn(number))
    assert seen(history) == expected
    assert visible_turns(range(10), window, sink) == expected


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("sink", [0, 1])
def test_forgetting_never_changes_what_is_seen(window, sink):
    history = History(window, sink)
    for number in range(130):
        assert seen(history) == visible_turns(range(number), window, sink)
        history.append(turn(number))
        assert len(history.turns) <= max(window, 2)


def test_memory_stays_flat_over_a_long_game():
    history = History(window=5, sink=1)
    sizes = []
    tracemalloc.start()
    for number in range(300):
        history.append(turn(number, np.zeros((17, 64, 96, 3), np.uint8)))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[50:]) - min(sizes[50:]) < 400_000  # one shot weighs 313 kB


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (-1, 0), (5, 2), (5, -1)])
def test_history_bounds(window, sink):
    with pytest.raises(ValueError, match="expected"):
        History(window, sink)
