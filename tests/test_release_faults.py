"""The faults of the release that this code does not have, by number, and the test of each.

Most are covered where the behaviour is at home; ``COVERED`` names those tests. What was nowhere is
tested here. (Those of the web app concern the game session; the page has its own tests.)
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from animegamer.config import Config, PlayConfig
from animegamer.game import CharacterState, GameState, Instruction, MotionScope, Turn
from animegamer.models.mllm import Prediction
from animegamer.session import GameSession
from tests.tiny_game import NUM_TOKENS, WIDTH, make_base, make_mllm, turn

ROOT = Path(__file__).parents[1]
HERE = "tests/test_release_faults.py"
COVERED = {
    1: ("The web app gives the decoder the social change as motion level.", [
        "tests/test_session.py::test_motion_scope_reaches_the_decoder",
    ]),
    2: ("The window is 1: no history is ever read.", [
        "tests/test_session.py::test_the_model_sees_the_window_and_the_sink",
        "tests/test_full_configs.py::test_every_stage_has_its_own_numbers",
    ]),
    3: ("History turns carry the current turn's states, and </ST> twice.", [
        f"{HERE}::test_every_history_turn_has_its_own_state_once",
    ]),
    4: ("States are written from token ids, without the history's pictures, under another mask.", [
        f"{HERE}::test_the_history_s_pictures_reach_the_states",
        "tests/models/test_mllm.py::test_the_cache_equals_one_full_pass",
        "tests/models/test_mllm.py::test_prediction_is_the_training_pass",
    ]),
    5: ("Predictions are taken three positions too late.", [
        "tests/test_parity.py::test_hidden_states_and_predictions",
        "tests/test_language.py::test_render_marks_slots_and_queries",
    ]),
    6: ("A state that cannot be read becomes zeros.", [
        "tests/test_language.py::test_what_the_grammar_allows_parses",
        "tests/test_language.py::test_malformed_states_name_the_place",
        "tests/test_language.py::test_malformed_histories_are_errors",
    ]),
    7: ("Two tables of motion levels.", [
        f"{HERE}::test_there_is_one_table_of_motion_levels",
        "tests/test_game.py::test_motion_scope_table",
    ]),
    8: ("Meters belong to the process: all visitors share them, and nothing resets them.", [
        "tests/test_session.py::test_sessions_share_nothing",
        "tests/test_session.py::test_a_restart_forgets_everything",
        "tests/test_game.py::test_meters_of_two_games_are_apart_and_answers_are_copies",
    ]),
    9: ("Turn 51 overflows.", [
        "tests/test_session.py::test_a_hundred_turns_keep_no_more_than_the_window",
    ]),
    10: ("Later turns drop adverb and time of day.", [
        f"{HERE}::test_later_turns_are_asked_in_full",
        f"{HERE}::test_every_history_turn_has_its_own_state_once",
    ]),
    11: ("Files are named n_1.mp4.", [
        "tests/test_inference_scripts.py::test_videos_play_in_browsers_and_are_enlarged",
    ]),
    12: ("One shot at a time, and 226 tokens written into the network.", [
        "tests/test_session.py::test_real_networks_play_a_batch_like_single_games",
        "tests/models/test_decoder.py::test_a_shot_does_not_depend_on_its_batch",
        "tests/models/test_decoder.py::test_shape_and_dependence",
    ]),
    13: ("A stage is chosen by commenting lists in and out.", [
        "tests/test_training.py::test_select_trainable_by_module_and_by_part_of_a_name",
        "tests/test_full_configs.py::test_every_stage_has_its_own_numbers",
    ]),
    14: ("Loading with strict=False only prints what is missing.", [
        "tests/models/test_mllm.py::test_foreign_and_incomplete_weights_are_refused",
        "tests/models/test_decoder_files.py::test_bad_files_are_named",
        "tests/models/test_backbones.py::test_a_lost_weight_is_no_random_one",
        "tests/test_session.py::test_a_decoder_with_a_weight_missing_is_refused",
    ]),
    15: ("Dynamic guidance is given the timestep for the step, so it swings.", [
        "tests/test_parity.py::test_schedules",
        "tests/models/test_diffusion.py::test_dynamic_guidance_rises",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("number", range(1, 16))
def test_every_fault_has_a_test(number):
    _, tests = COVERED[number]
    assert tests
    for name in tests:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


@pytest.fixture(scope="module")
def mllm(tmp_path_factory):
    return make_mllm(make_base(tmp_path_factory.mktemp("faults")))


STATES = [
    (1, CharacterState(5, -5, 0)),
    (4, CharacterState(-2, 3, 1)),
    (2, CharacterState(0, 4, -4)),
]
ASKED = [
    Instruction(("Nilo",), "gently talk", "night town"),
    Instruction(("Mavi", "Nilo"), "gently walk", "day sea"),
    Instruction(("Juno",), "gently run", "night sea"),
    Instruction(("Nilo",), "gently talk", "night town"),
]


def history():
    s_a = [turn(n).state.s_a for n in range(len(STATES))]
    states = [GameState(MotionScope(level), change) for level, change in STATES]
    return [
        Turn(asked, GameState(state.motion_scope, state.change, each))
        for asked, state, each in zip(ASKED, states, s_a, strict=False)
    ]


def test_every_history_turn_has_its_own_state_once(mllm):
    language = mllm.language
    ids = language.render(history(), ASKED[-1]).ids.tolist()
    starts = [place for place, token in enumerate(ids) if token == language._turn]
    turns = [ids[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert len(turns) == 4
    for tokens, asked in zip(turns, ASKED, strict=True):
        text = language.text_ids(asked).tolist()
        assert tokens[: len(text)] == text, "the whole instruction, in every turn"
    level_tag, end = language._id["<ML>"], language._id["</ST>"]
    for tokens, (level, change) in zip(turns, STATES, strict=False):
        state = tokens[tokens.index(level_tag) :]
        assert language.parse(state) == (MotionScope(level), change)
        assert state.count(end) == 1
    assert turns[-1][-1] == level_tag and end not in turns[-1]


def test_the_history_s_pictures_reach_the_states(mllm):
    """What the first state token is read from depends on the pictures of the turns in view."""
    read = []
    handle = mllm.mistral.lm_head.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].clone())
    )
    seen = history()
    mllm.predict([seen], [ASKED[-1]])
    state = seen[0].state
    seen[0] = Turn(
        seen[0].instruction, GameState(state.motion_scope, state.change, -np.asarray(state.s_a))
    )
    mllm.predict([seen], [ASKED[-1]])
    handle.remove()
    assert (read[0] - read[len(read) // 2]).abs().max() > 1e-3


def test_later_turns_are_asked_in_full():
    asked = []

    class Recorder:
        def predict(self, histories, instructions):
            asked.extend(map(str, instructions))
            s_a = torch.zeros(len(instructions), NUM_TOKENS, WIDTH)
            return Prediction(s_a, [MotionScope(1)], [CharacterState(0, 0, 0)])

    session = GameSession(Config(play=PlayConfig(window=3)), Recorder(), None, lambda: None)
    for instruction in ASKED:
        session.step(instruction)
    assert asked == [str(instruction) for instruction in ASKED]
    assert all("gently" in line and ("night" in line or "day" in line) for line in asked)


def test_there_is_one_table_of_motion_levels():
    """No other row of five rising numbers from 0.5 to 40 stands anywhere in the code."""
    tables = []
    for folder in ("animegamer", "scripts", "data_pipeline", "game_demo", "."):
        pattern = "*.py" if folder == "." else "**/*.py"
        for path in (ROOT / folder).glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Tuple, ast.List)):
                    values = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                    if len(values) == 5 and values[0] == 0.5 and values[-1] == 40:
                        tables.append((path.relative_to(ROOT).as_posix(), tuple(values)))
    assert tables == [("animegamer/game.py", MotionScope.SCALARS)]
