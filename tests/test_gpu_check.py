"""The GPU check in miniature, on a CPU: every measurement runs, and says what it found."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks import gpu_check, half_precision
from benchmarks.report import NotHere, Report

PRESETS = {"one_large", "two_24gb", "one_24gb", "one_24gb_int8", "one_12gb_nf4", "one_8gb"}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Both files of a run at the small size."""
    AcceleratorState._reset_state(True)
    output = tmp_path_factory.mktemp("check")
    arguments = ["--size", "small", "--output", str(output), "--minutes", "1000"]
    code = gpu_check.main([*arguments, "--only", "play", "train", "memory", "play more"])
    AcceleratorState._reset_state(True)
    assert code == 0
    tree = json.loads((output / "gpu_check.json").read_text(encoding="utf-8"))
    return tree, (output / "gpu_check.md").read_text(encoding="utf-8")


def rows(checked, part):
    return {row["name"]: row for row in checked[0]["rows"] if row["part"] == part}


def test_a_turn_is_split_into_mllm_and_decoder(checked):
    played = rows(checked, "play")
    assert set(played) == {"play", "memory/one_large", "memory/one_24gb", "memory/one_8gb"}
    for row in played.values():
        figures = row["figures"]
        assert figures["MLLM (s)"] > 0 and figures["decoder (s)"] > 0 and not row["note"]
        assert figures["turn (s)"] == pytest.approx(figures["MLLM (s)"] + figures["decoder (s)"])


def test_every_stage_takes_steps_beside_its_plan(checked):
    trained = rows(checked, "train")
    assert set(trained) == {"stage1_warmup", "stage1_joint", "stage2", "stage3"}
    for row in trained.values():
        assert row["passed"] and not row["note"]
        assert row["figures"]["step (s)"] > 0 and row["figures"]["planned (GB)"] > 0
        assert torch.cuda.is_available() or row["figures"]["peak (GB)"] is None
    planned = {name: row["figures"]["planned (GB)"] for name, row in trained.items()}
    assert planned["stage1_warmup"] < planned["stage1_joint"]


def test_presets_play_as_the_plain_configuration(checked):
    presets = rows(checked, "memory")
    assert set(presets) == PRESETS
    for name, row in presets.items():
        assert row["passed"], row
        if name in ("one_24gb_int8", "one_12gb_nf4") and not torch.cuda.is_available():
            assert "not measured" in row["note"] and "needs a GPU" in row["note"]
        else:
            assert row["figures"]["same states"] == "yes"
            assert row["figures"]["s_a error"] <= row["figures"]["s_a tolerance"] < 0.01
            assert row["figures"]["shot error"] <= row["figures"]["shot tolerance"]


def test_the_page_names_card_and_versions(checked):
    tree, page = checked
    assert tree["about"]["size"] == "small" and tree["about"]["card"] in page
    assert f"- torch: {torch.__version__.partition('+')[0]}" in page
    for row in tree["rows"]:
        assert f"| {row['name']} |" in page


def test_half_precision_is_close_to_the_reference_and_not_equal():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seen = {}
    for name, compare in half_precision.comparisons(device):
        if name in ("decoder, bfloat16", "MLLM, bfloat16", "MLLM loss, bfloat16"):
            seen[name] = compare()
        elif name == "autoencoder, float16" and device == "cpu":
            with pytest.raises(NotHere):
                compare()
    assert len(seen) == 3
    for name, figures in seen.items():
        assert 1e-5 < figures["error"] <= figures["tolerance"] and figures["passed"], name


def test_what_does_not_fit_is_reported_and_the_rest_goes_on(tmp_path):
    report = Report("small", [], tmp_path)

    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    report.take("train", ("large", too_large))
    report.take("train", ("small", lambda: {"step (s)": 0.5}))
    report.take("train", ("late", too_large), late=True)
    assert report.passed
    notes = {row.name: row.note for row in report.rows}
    assert notes == {"large": "out of memory", "small": "", "late": "not measured: the time is up"}
    assert "| small | 0.5 |  |" in (tmp_path / "gpu_check.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("figures", [{"error": 0.2, "passed": False}, None])
def test_what_is_wrong_fails_the_check(tmp_path, figures):
    report = Report("small", [], tmp_path)

    def measure():
        if figures is None:
            raise RuntimeError("no kernel image")
        return dict(figures)

    report.take("parity", ("wrong", measure))
    assert not report.passed
    assert "outside its tolerance" in report.markdown() or "no kernel image" in report.markdown()


def test_not_a_number_is_outside_every_tolerance():
    judged = half_precision.judged({"good": 0.0, "broken": float("nan")}, 0.1)
    assert judged["worst case"] == "broken" and not judged["passed"]
    assert half_precision.judged({"good": 0.05}, 0.1)["passed"]


def test_a_setting_that_does_not_exist_is_an_error(tmp_path, capsys):
    code = gpu_check.main(["--size", "small", "--output", str(tmp_path), "train.batch=1"])
    assert code == 2 and "batch_size" in capsys.readouterr().err
