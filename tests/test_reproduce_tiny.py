"""scripts/reproduce_tiny.sh: its short plan fits the configurations, and what it calls exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from animegamer import config

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/reproduce_tiny.sh"
PLANNER = re.search(r"<<'PYTHON'\n(.*?)^PYTHON$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[1]


def plan(minutes, cores=2, bf16=1):
    done = subprocess.run(
        [sys.executable, "-", str(minutes), str(cores), str(bf16)],
        input=PLANNER,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return done, {name: value.split() for name, _, value in lines}


def test_it_is_a_shell_script():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    wrong = subprocess.run(
        ["bash", str(SCRIPT), "--minutes", "soon"], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "usage:" in wrong.stderr


def test_what_it_calls_exists():
    text = re.sub("#.*", "", SCRIPT.read_text())
    trained = re.findall(r"train (\w+) \"\$\w+\" (\w+)", text)
    assert [name for name, _ in trained] == [
        "video_base",
        "stage1_warmup",
        "stage1_joint",
        "stage1_decoder",
        "stage2",
        "stage3",
    ]
    called = {file for _, file in trained}
    called |= set(re.findall(r"script \w+ \S+ (\w+)", text))
    called |= set(re.findall(r"evaluation \w+ \S+ (\w+)", text)) | {"train_backbones"}
    for file in called:
        assert (ROOT / "scripts" / f"{file}.py").is_file(), file
    for name, _ in trained:
        assert (ROOT / f"configs/tiny/{name}.yaml").is_file(), name


def test_the_full_version_changes_nothing():
    done, lines = plan(0)
    assert done.returncode == 0, done.stderr
    assert set(lines) == {"games", "all", "estimate"} and lines["all"] == []


def test_a_core_without_bfloat16_trains_in_float32():
    _, lines = plan(0, bf16=0)
    assert config.load(ROOT / "configs/tiny/stage2.yaml", lines["all"]).train.precision == "no"


@pytest.mark.parametrize("cores", [1, 2])
def test_the_short_version_scales_everything_and_fits(cores):
    done, lines = plan(90, cores)
    assert done.returncode == 0, done.stderr
    assert int(lines["estimate"][0]) <= 90
    shares = []
    for name in ("video_base", "stage1_joint", "stage1_decoder", "stage2", "stage3"):
        full = config.load(ROOT / f"configs/tiny/{name}.yaml").train
        short = config.load(ROOT / f"configs/tiny/{name}.yaml", lines[name]).train
        assert short.warmup_steps < short.steps < full.steps
        assert 0 < short.ema_decay <= full.ema_decay
        shares.append(short.steps / full.steps)
    assert max(shares) - min(shares) < 0.01
    for name in ("backbones", "evaluate", "stage1_warmup"):
        loaded = config.load(ROOT / f"configs/tiny/{name}.yaml", lines[name])
        assert loaded != config.load(ROOT / f"configs/tiny/{name}.yaml")


def test_too_short_is_refused():
    done, _ = plan(5)
    assert done.returncode != 0 and "too short" in done.stderr
