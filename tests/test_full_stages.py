"""configs/full as a user runs it, every stage through its script, at toy sizes: LoRA and all."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from animegamer import config as configuration
from animegamer.checkpoint import exported
from animegamer.game import Instruction
from animegamer.session import GameSession
from tests.tiny_checkpoint import N_TEXT, N_VISUAL, make_checkpoint, make_video_base
from tests.tiny_stages import HEIGHT, SHORT, WIDTH, draw_world, paths

ROOT = Path(__file__).parents[1]
FULL = ROOT / "configs" / "full"


def overrides(work):
    sizes = {
        "shot.height": HEIGHT,
        "shot.width": WIDTH,
        "backbones.latent_scale": 1.0,
        "backbones.text_tokens": N_TEXT,
        "backbones.visual_tokens": N_VISUAL,
        "backbones.image_height": 16,
        "backbones.image_width": 24,
        "decoder.motion_scope_hidden": 8,
        "decoder.lora.rank": 2,
        "mllm.lora.rank": 2,
        "sampling.steps": 2,
        "data.workers": 1,
        "train.threads": 1,
        "train.log_every": 1,
        "train.precision": "no",
    }
    return [
        *paths(work, work / "tiny/backbones"),
        *(f"{key}={value}" for key, value in sizes.items()),
        *SHORT,
    ]


def run(script, name, work, *more):
    arguments = ["--config", str(FULL / f"{name}.yaml"), *overrides(work)]
    importlib.import_module(script).main([*arguments, f"train.run={work}/runs/{name}", *more])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Backbones, two films, and two steps of every stage on them."""
    AcceleratorState._reset_state(True)
    path = tmp_path_factory.mktemp("full")
    make_checkpoint(path / "tiny")
    make_video_base(path / "tiny", HEIGHT, WIDTH)
    draw_world(path)
    run("data_pipeline.features", "features", path)
    run("scripts.train_stage1", "stage1_warmup", path, "train.init=null")
    warmup, joint = (f"train.init={path}/runs/stage1_{name}" for name in ("warmup", "joint"))
    run("scripts.train_stage1", "stage1_joint", path, warmup)
    run("scripts.train_stage2", "stage2", path, joint)
    run("scripts.predict_states", "stage3", path, joint)
    run("scripts.train_stage3", "stage3", path, joint)
    yield path
    AcceleratorState._reset_state(True)


def trained(work, name):
    directory = next((work / "runs" / name).glob("step_*"))
    return set(load_file(directory / "trained.safetensors"))


def test_every_stage_finishes(work):
    for name in ("stage1_warmup", "stage1_joint", "stage2", "stage3"):
        state = json.loads((work / "runs" / name / "step_0000002/state.json").read_text())
        assert state["finished"] is True, name


def test_what_trains_is_what_the_paper_trains(work):
    assert {name.partition(".")[0] for name in trained(work, "stage1_warmup")} == {"encoder"}
    joint = trained(work, "stage1_joint")
    decoder = {name for name in joint if name.startswith("decoder.")}
    assert len(decoder) < len(joint)
    kinds = (".lora_", ".norm1.linear.", ".norm2.linear.", ".ofs_embedding.")
    assert all(any(kind in name for kind in kinds) for name in decoder)
    assert {kind for kind in kinds for name in decoder if kind in name} == set(kinds)
    assert trained(work, "stage3") == decoder
    mllm = trained(work, "stage2")
    whole = ("embed_tokens", "lm_head", "input_projection", "output_projection")
    assert all(any(word in n for word in (".lora_", "modules_to_save", *whole)) for n in mllm)
    assert {word for word in whole for name in mllm if word in name} == set(whole)
    assert not any("base_layer" in name for name in (*joint, *mllm))


def test_exports_are_adapters(work):
    decoder = exported(work / "runs/stage3") / "decoder"
    assert (decoder / "adapter/adapter_model.safetensors").is_file()
    mllm = exported(work / "runs/stage2") / "mllm"
    stored = set(load_file(mllm / "adapter/adapter_model.safetensors"))
    assert any("embed_tokens" in name for name in stored) and any("lm_head" in n for n in stored)


def test_the_runs_make_a_checkpoint_that_plays(work):
    runs = {"encoder": "stage1_joint", "decoder": "stage3", "mllm": "stage2"}
    script = importlib.import_module("scripts.assemble_checkpoint")
    code = script.main(
        [
            "--config",
            str(FULL / "assemble.yaml"),
            *overrides(work),
            *(f"assemble.{part}={work}/runs/{run}" for part, run in runs.items()),
            f"assemble.output={work}/mine",
            "assemble.curves=[]",
        ]
    )
    assert code == 0 and not (work / "mine/vocabulary.json").exists()
    config = configuration.load(
        FULL / "memory/one_24gb.yaml",
        [
            *overrides(work),
            f"play.checkpoint={work}/mine",
            "play.device=cpu",
            "play.memory.autoencoder_slicing=false",  # the tiny autoencoder has none
        ],
    )
    session = GameSession.load(config)
    for _ in range(2):
        state = session.step(Instruction(("Nilo",), "slowly walk", "day meadow"))
        assert state.shot.shape == (17, HEIGHT, WIDTH, 3)
