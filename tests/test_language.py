from __future__ import annotations

import itertools

import numpy as np
import pytest

from animegamer.game import (
    CharacterState,
    GameState,
    Instruction,
    InstructionError,
    MotionScope,
    Turn,
)
from animegamer.language import (
    IGNORE,
    Language,
    LanguageError,
    add_special_tokens,
    load_tokenizer,
    special_tokens,
)
from tests.tiny_game import NUM_TOKENS, instruction, make_base, turn


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def language(base):
    tokenizer = load_tokenizer(base)
    add_special_tokens(tokenizer, 8)
    return Language(tokenizer, NUM_TOKENS)


def decode(language, ids):
    return "".join(language.tokenizer.convert_ids_to_tokens([int(i) for i in ids]))


def test_special_tokens_lie_where_the_release_has_them():
    place = {name: 32000 + i for i, name in enumerate(special_tokens())}
    assert len(place) == 284
    expected = {
        "<frame_00000>": 32000,
        "<frame_00255>": 32255,
        "<img>": 32256,
        "</img>": 32257,
        "<vid>": 32258,
        "</vid>": 32259,
        "<frame>": 32260,
        "</frame>": 32261,
        "<Strength_-5>": 32262,
        "<Strength_5>": 32272,
        "<visual>": 32273,
        "<ML>": 32274,
        "</ML>": 32275,
        "<SC>": 32276,
        "</SC>": 32277,
        "<ET>": 32278,
        "</ET>": 32279,
        "<ST>": 32280,
        "</ST>": 32281,
        "<TURN>": 32282,
        "</TURN>": 32283,
    }
    assert {name: place[name] for name in expected} == expected


def test_adding_twice_adds_nothing(base):
    tokenizer = load_tokenizer(base)
    assert add_special_tokens(tokenizer, 8) == 8 + 28
    assert add_special_tokens(tokenizer, 8) == 0


def test_a_saved_tokenizer_gives_the_same_ids(language, tmp_path):
    language.tokenizer.save_pretrained(str(tmp_path))
    again = Language(load_tokenizer(tmp_path), NUM_TOKENS)
    for seed in range(5):
        assert again.text_ids(instruction(seed)).tolist() == (
            language.text_ids(instruction(seed)).tolist()
        )


def test_text_behind_turn_has_no_space_marker(language):
    ids = language.text_ids(instruction(0))
    first = language.tokenizer.convert_ids_to_tokens([int(ids[0]), int(ids[1])])
    assert first[0] == "<TURN>"
    assert not first[1].startswith("▁")
    assert language.tokenizer.decode(ids[1:]) == str(instruction(0))


def test_any_language_survives(language):
    asked = Instruction(("Nilo", "梅维"), "そっと話す", "夜晚的小镇 🎐")
    assert language.tokenizer.decode(language.text_ids(asked)[1:]) == str(asked)


def test_render_is_the_release_layout(language):
    history = [turn(0, opening=True), turn(1)]
    rendered = language.render(history, instruction(2))
    slots = "<img><frame>" + "".join(f"<frame_{i:05d}>" for i in range(NUM_TOKENS))
    slots += "</frame></img>"
    state = history[1].state
    values = (state.motion_scope.level, state.change.social, state.change.entertainment)
    level, social, entertainment = (f"<Strength_{k}>" for k in values)
    stamina = f"<Strength_{state.change.stamina}>"
    text = [str(i).replace(" ", "▁") for i in (instruction(1), instruction(2))]
    assert decode(language, rendered.ids) == (
        f"<s><TURN>{slots}</TURN>"
        f"<TURN>{text[0]}{slots}<ML>{level}</ML><SC>{social}</SC><ET>{entertainment}</ET>"
        f"<ST>{stamina}</ST></TURN>"
        f"<TURN>{text[1]}{slots}<ML>"
    )


def test_render_marks_slots_and_queries(language):
    rendered = language.render([turn(0, opening=True), turn(1)], instruction(2))
    frames = language.tokenizer.convert_tokens_to_ids([f"<frame_{i:05d}>" for i in range(6)])
    assert rendered.slot[rendered.slot >= 0].tolist() == list(range(2 * NUM_TOKENS))
    assert rendered.query[rendered.query >= 0].tolist() == list(
        range(2 * NUM_TOKENS, 3 * NUM_TOKENS)
    )
    marked = (rendered.slot >= 0) | (rendered.query >= 0)
    assert rendered.ids[marked].tolist() == 3 * frames
    assert set(frames) & set(rendered.ids[~marked].tolist()) == set()
    assert rendered.position_ids.tolist() == list(range(len(rendered)))
    assert (rendered.labels == IGNORE).all()
    assert (rendered.branch == 0).all()


def test_window_one_has_one_turn(language):
    rendered = language.render([], instruction(0))
    assert (rendered.slot == -1).all()
    assert len(rendered) == 1 + len(language.text_ids(instruction(0))) + NUM_TOKENS + 5


def test_every_state_survives(language):
    for level, stamina, social in itertools.product(range(1, 6), range(-5, 6, 2), range(-5, 6)):
        scope, change = MotionScope(level), CharacterState(stamina, social, -stamina)
        assert language.parse(language.state_ids(scope, change)) == (scope, change)


def test_what_the_grammar_allows_parses(language):
    random = np.random.default_rng(0)
    for _ in range(200):
        language.parse([int(random.choice(allowed)) for allowed in language.grammar])
    assert [len(allowed) for allowed in language.grammar] == [5, 1, 1, 11, 1, 1, 11, 1, 1, 11, 1, 1]


def test_malformed_states_name_the_place(language):
    good = language.state_ids(MotionScope(3), CharacterState(1, 2, 3)).tolist()
    zero = language.tokenizer.convert_tokens_to_ids("<Strength_0>")
    bad = good.copy()
    bad[1] = zero
    with pytest.raises(
        LanguageError, match=r"state token 0 is <Strength_0>, expected <Strength_1>"
    ):
        language.parse(bad)
    swapped = good.copy()
    swapped[3], swapped[6] = swapped[6], swapped[3]
    with pytest.raises(LanguageError, match="state token 2 is <ET>, expected <SC>"):
        language.parse(swapped)
    with pytest.raises(LanguageError, match="12 tokens"):
        language.parse(good[:7])
    with pytest.raises(LanguageError):
        language.parse([])


def test_malformed_histories_are_errors(language):
    with pytest.raises(LanguageError, match="only the first may open"):
        language.render([turn(0), turn(1, opening=True)], instruction(2))
    stateless = Turn(instruction(0), GameState(None, None))
    with pytest.raises(LanguageError, match="no motion scope"):
        language.render([stateless], instruction(2))


def test_reserved_words_are_refused(language):
    for word in ("<SC>", "</TURN>", "<frame_00007>", "</s>"):
        with pytest.raises(InstructionError, match="reserved"):
            language.text_ids(Instruction(("Nilo",), f"walk {word}", "town"))


def test_too_long_an_instruction_is_refused(language):
    words = " ".join(["walk"] * 400)
    with pytest.raises(InstructionError, match=r"at most \d+ fit"):
        language.text_ids(Instruction(("Nilo",), words, "town"))


def test_a_tokenizer_without_special_tokens_is_refused(base):
    tokenizer = load_tokenizer(base)
    with pytest.raises(LanguageError, match="lacks 34 special tokens"):
        Language(tokenizer, NUM_TOKENS)
    add_special_tokens(tokenizer, 4)
    with pytest.raises(LanguageError, match="<frame_00004>"):
        Language(tokenizer, NUM_TOKENS)
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(base / "nowhere")


def test_packing_shares_positions_between_branches(language):
    turns = [turn(0, opening=True), turn(1), turn(2), turn(3)]
    rendered = language.render_training(turns, [False, False, True, True])
    plain = language.render(turns[:3], turns[3].instruction, turns[3].state)
    own = (rendered.branch == 0) | (rendered.branch == 4)
    for name in ("ids", "position_ids", "slot", "query"):
        assert getattr(rendered, name)[own].tolist() == getattr(plain, name).tolist()
    assert rendered.labels[rendered.branch == 4].tolist() == (
        plain.labels[plain.query.argmax() - NUM_TOKENS - 1 :].tolist()
    )
    assert set(rendered.branch.tolist()) == {0, 3, 4}


def test_the_turns_after_the_last_supervised_are_left_out(language):
    turns = [turn(1), turn(2), turn(3)]
    rendered = language.render_training(turns, [True, False, False])
    plain = language.render([], turns[0].instruction, turns[0].state)
    assert rendered.ids.tolist() == plain.ids.tolist()


@pytest.mark.parametrize("flags", [[False, False], [True], [True, True]])
def test_wrong_supervision_is_an_error(language, flags):
    with pytest.raises(LanguageError):
        language.render_training([turn(0, opening=True), turn(1)], flags)
