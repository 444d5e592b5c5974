"""The whole pipeline as a user runs it, through the scripts, at toy size; then what can go wrong.

One run of everything is shared; a test that damages something works on a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import CheckpointError, exported
from animegamer.config import load
from animegamer.features import FeatureError, FeatureStore
from animegamer.models.backbones import load_autoencoder, load_image_encoder, load_text_encoder
from animegamer.models.mllm import NextStateMLLM
from animegamer.parallel import LaunchError
from animegamer.records import read_shots
from animegamer.training_log import Log
from animegamer.video import VideoError, read_video, to_float
from tests.tiny_stages import HEIGHT, PRETRAIN, ROOT, SHORT, WIDTH, overrides, run

RUNS = {
    "video_base": 2,
    "stage1_warmup": 2,
    "stage1_joint": 2,
    "stage2": 2,
    "stage3": 2,
    "backbones/t5": 3,
    "backbones/mistral": 3,
    "backbones/image_encoder": 2,
    "backbones/autoencoder": 2,
    "backbones/autoencoder_decoder": 2,
}
TOKENS, D = 6 + 8, 32


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate remembers the first precision of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def metrics(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(directory, part):
    return load_file(exported(directory) / part / "diffusion_pytorch_model.safetensors")


# ---- what comes out


@pytest.mark.parametrize(("name", "steps"), RUNS.items())
def test_every_run_is_finished_and_logged(work, name, steps):
    directory = work / "runs" / name
    state = json.loads((directory / f"step_{steps:07d}" / "state.json").read_text())
    assert state["finished"] is True and state["step"] == steps
    lines = metrics(directory)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert all(np.isfinite(v) for line in lines for v in line.values())
    assert f"finished at step {steps}" in (directory / "train.log").read_text()
    assert (directory / "config.yaml").is_file() and list(directory.glob("tensorboard/*"))


def test_nothing_temporary_is_left(work):
    assert [path for path in work.rglob("*") if path.name.startswith(".")] == []


def test_states_name_their_parents(work):
    def parents(name):
        state = next((work / "runs" / name).glob("step_*/state.json"))
        return json.loads(state.read_text())["parents"].keys()

    backbones = {"autoencoder", "image_encoder", "text_encoder"}
    assert parents("video_base") == backbones
    assert parents("stage1_warmup") == {*backbones, "base"}
    assert parents("stage1_joint") == {*backbones, "init"}
    assert parents("stage2") == {*backbones, "init", "base"}
    assert parents("stage3") == {*backbones, "init", "encoder", "mllm"}


@pytest.mark.parametrize("stage", ["stage1_joint", "stage3"])
def test_a_sheet_of_samples_is_there(work, stage):
    sheets = list((work / "runs" / stage / "samples").iterdir())
    assert [sheet.name for sheet in sheets] == ["step_0000002.png"]
    pixels = np.asarray(Image.open(sheets[0]))
    assert pixels.shape == (2 * HEIGHT, 2 * 4 * WIDTH, 3)  # two shots: drawn, then generated
    drawn, generated = pixels[:, : 4 * WIDTH], pixels[:, 4 * WIDTH :]
    assert drawn.std() > 10 and not np.array_equal(drawn, generated)


@pytest.mark.parametrize("stage", ["stage1_joint", "stage3"])
def test_validation_judges_loss_pictures_and_motion(work, stage):
    line = metrics(work / "runs" / stage)[-1]
    names = {"loss", "latent_mse", "psnr", "acc_f", "mae_f", "sharpness"}
    assert {f"validation/{name}" for name in names} == line.keys() - {"step", "time"}
    assert 0 <= line["validation/acc_f"] <= 1 and line["validation/psnr"] > 0


def test_features_are_there_for_every_shot(work):
    store = FeatureStore(work / "data" / "features")
    shots = [
        s
        for split in ("train", "validation")
        for s in read_shots(work / "data" / split / "shots.jsonl")
    ]
    assert set(store) == {shot.shot_id for shot in shots}
    arrays = store[shots[0].shot_id]
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == {
        "latents": (5, 8, HEIGHT // 8, WIDTH // 8),
        "f_v": (8, 24),
        "f_v_random": (8, 24),
        "f_md": (6, 16),
    }
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_features_are_what_the_backbones_make_of_a_clip(work):
    config = load(ROOT / "configs/tiny/features.yaml", overrides(work))
    autoencoder = load_autoencoder(config.backbones)
    image_encoder, text_encoder = (
        make(config.backbones) for make in (load_image_encoder, load_text_encoder)
    )
    store = FeatureStore(work / "data" / "features")
    for shot in read_shots(work / "data/train/shots.jsonl")[:4]:
        frames = to_float(read_video(work / "data/train" / shot.clip))
        video = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
        expected = {
            "latents": autoencoder.encode(video)[0],
            "f_v": image_encoder(video[:, :, 0])[0],
            "f_md": text_encoder([shot.action])[0],
        }
        for name, value in expected.items():
            found = torch.from_numpy(store[shot.shot_id][name]).float()
            torch.testing.assert_close(found, value, atol=5e-3, rtol=5e-3, msg=name)


def test_warm_up_trains_the_encoder_alone(work):
    base = load_file(work / "backbones/video_base/diffusion_pytorch_model.safetensors")
    decoder = weights(work / "runs/stage1_warmup", "decoder")
    for name, value in decoder.items():
        if not name.startswith("ofs_embedding."):
            assert torch.equal(value, base[name].float()), name
    assert decoder["ofs_embedding.linear_2.weight"].abs().max() > 0


def test_every_stage_goes_on_from_the_one_before(work):
    warmup, joint = work / "runs/stage1_warmup", work / "runs/stage1_joint"
    for part in ("encoder", "decoder"):
        before, after = weights(warmup, part), weights(joint, part)
        assert before.keys() == after.keys()
        changed = [k for k in before if not torch.equal(before[k], after[k])]
        assert len(changed) > 0.8 * len(before)
        assert all((before[k] - after[k]).abs().max() < 0.05 for k in before)
    adapted, before = weights(work / "runs/stage3", "decoder"), weights(joint, "decoder")
    assert any(not torch.equal(before[k], adapted[k]) for k in before)
    assert all((before[k] - adapted[k]).abs().max() < 0.05 for k in before)
    assert not (exported(work / "runs/stage3") / "encoder").exists()


def test_predictions_are_there_on_true_and_on_own_history(work):
    shots = [
        s
        for split in ("train", "validation")
        for s in read_shots(work / "data" / split / "shots.jsonl")
    ]
    true, own = (FeatureStore(work / "data" / name) for name in ("predictions", "own"))
    assert set(true) == set(own) == {shot.shot_id for shot in shots if shot.turn > 0}
    assert true.source == own.source and true.source.keys() == {"encoder", "mllm"}
    first, later = [], []
    for shot in shots:
        if shot.turn > 0:
            a, b = (store[shot.shot_id]["s_a_hat"].astype(float) for store in (true, own))
            assert a.shape == (TOKENS, D) and np.isfinite(a).all()
            (first if shot.turn == 1 else later).append(np.abs(a - b).max())
    assert max(first) < 2e-2  # the same history: the opening, or none
    assert max(later) > 1e-3
    null = load_file(work / "data/own/null.safetensors")["s_a_null"]
    assert null.shape == (TOKENS, D) and null.abs().mean() > 0.1


def test_the_mllm_plays(work):
    mllm = NextStateMLLM.from_pretrained(exported(work / "runs/stage2") / "mllm")
    instruction = read_shots(work / "data/train/shots.jsonl")[1].instruction
    found = mllm.predict([[]], [instruction])
    assert found.s_a_hat.shape == (1, TOKENS, D) and len(found.changes) == 1


def test_stage_2_trains_the_mllm_of_a_whole_checkpoint_on(work, tmp_path):
    for part, stage in (("encoder", "stage1_joint"), ("mllm", "stage2")):
        shutil.copytree(exported(work / "runs" / stage) / part, tmp_path / "whole" / part)
    still = ["train.lr=1e-9", "train.matrix_lr=1e-9", "train.ema_decay=0"]
    init, there = f"train.init={tmp_path / 'whole'}", f"train.run={tmp_path / 'run'}"
    run("scripts.train_stage2", "stage2", work, *SHORT, init, there, *still)
    name = "mllm/projections.safetensors"
    after, before = (
        load_file(exported(tmp_path / "run") / name),
        load_file(tmp_path / "whole" / name),
    )
    assert all((after[k] - before[k]).abs().max() < 1e-5 for k in before)


# ---- running it again


def test_a_second_run_of_everything_changes_nothing(work):
    def seen():
        return {
            path: path.stat().st_mtime_ns
            for path in work.rglob("*")
            if path.suffix == ".safetensors"
            and "backbones" not in path.parts
            and path.name != "null.safetensors"
        }

    before = seen()
    init = f"train.init={work / 'runs' / 'stage1_joint'}"
    own = [f"data.predictions={work / 'data' / 'own'}", "data.prediction_history=own"]
    run("data_pipeline.features", "features", work)
    run("scripts.train_stage1", "stage1_warmup", work, *SHORT)
    run("scripts.train_stage2", "stage2", work, *SHORT, init, "train.validate_every=2")
    run("scripts.predict_states", "stage3", work, init)
    run("scripts.predict_states", "stage3", work, init, *own)
    assert seen() == before


def test_changed_clips_and_texts_are_made_again(work, tmp_path):
    data = tmp_path / "validation"
    shutil.copytree(work / "data" / "validation", data)
    shutil.copytree(work / "data" / "features", tmp_path / "features")
    lines = (data / "shots.jsonl").read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if json.loads(line)["action"])
    record = json.loads(lines[number])
    lines[number] = json.dumps({**record, "action": "sing loudly"})
    (data / "shots.jsonl").write_text("\n".join(lines) + "\n")
    before = FeatureStore(tmp_path / "features")
    run(
        "data_pipeline.features",
        "features",
        work,
        f"data.validation={data}",
        f"data.features={tmp_path / 'features'}",
    )
    after = FeatureStore(tmp_path / "features")
    changed = {
        (shot, name)
        for shot in after
        for name, value in after[shot].items()
        if not np.array_equal(value, before[shot][name])
    }
    assert changed == {(record["shot_id"], "f_md")}


LONG = [
    *SHORT,
    "train.steps=12",
    "train.save_every=3",
    "train.log_every=4",
    "train.ema_decay=0.9",
    "train.first_frame_share=0.3",
    "train.validate_every=5",
    "train.schedule=cosine",
]
DYING = """
import os, signal, sys
from animegamer.training_log import Log
from animegamer.video import VideoError, read_video, to_float
from scripts.train_stage1 import main
step, number, place = Log.step, int(sys.argv[1]), int(sys.argv[2])
def die(self, now, *arguments):
    step(self, now, *arguments)
    if now == place:
        os.kill(os.getpid(), number)
Log.step = die
main(sys.argv[3:])
"""


def stage1(work, directory):
    """The command line of a stage 1 run."""
    config = ["--config", str(ROOT / "configs/tiny/stage1_joint.yaml")]
    init = f"train.init={work / 'runs' / 'stage1_warmup'}"
    return [*config, *overrides(work), *LONG, init, f"train.run={directory}"]


def process(work, directory, number, place):
    """Runs stage 1 in a process that gets a signal after a step."""
    command = [sys.executable, "-c", DYING, str(int(number)), str(place), *stage1(work, directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_killed_run_goes_on_bit_for_bit(work, tmp_path):
    """Killed, started again, asked to stop, started again: as if nothing had happened."""
    from scripts.train_stage1 import main

    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    result = process(work, broken, signal.SIGKILL, 8)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert json.loads((broken / "step_0000006/state.json").read_text())["step"] == 6
    assert metrics(broken)[-1]["step"] == 8  # two steps later than the checkpoint
    result = process(work, broken, signal.SIGTERM, 10)
    assert result.returncode == 0, result.stderr
    assert json.loads((broken / "step_0000010/state.json").read_text())["finished"] is False
    main(stage1(work, broken))
    main(stage1(work, unbroken))
    last = "step_0000012"
    files = sorted(p.relative_to(broken) for p in (broken / last).rglob("*.safetensors"))
    assert {file.name for file in files} == {
        "trained.safetensors",
        "average.safetensors",
        "optimizer.safetensors",
        "diffusion_pytorch_model.safetensors",
    }
    for file in files:
        one, other = load_file(broken / file), load_file(unbroken / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one), file
    timeless = [
        [
            {k: v for k, v in line.items() if "time" not in k and "seconds" not in k}
            for line in metrics(path)
        ]
        for path in (broken, unbroken)
    ]
    assert timeless[0] == timeless[1]
    assert [line["step"] for line in timeless[0]] == [4, 5, 8, 10, 12, 12]


def test_stopping_the_backbones_starts_no_other_and_exports_nothing(work, tmp_path, monkeypatch):
    """Half a network must not take the place of a whole one."""
    (tmp_path / "data").symlink_to(work / "data")
    arguments = [*PRETRAIN, "pretrain.parts=[text]", "train.warmup_steps=1"]

    def stop(self, now, *rest):
        step(self, now, *rest)
        if now == 2:
            signal.raise_signal(signal.SIGTERM)

    step = Log.step
    monkeypatch.setattr(Log, "step", stop)
    with pytest.raises(SystemExit) as caught:
        run("scripts.train_backbones", "backbones", tmp_path, *arguments)
    assert caught.value.code == 0
    assert sorted(os.listdir(tmp_path / "runs/backbones")) == ["t5", "vocabulary"]
    assert not (tmp_path / "backbones").exists()
    monkeypatch.undo()
    run("scripts.train_backbones", "backbones", tmp_path, *arguments)
    for name in ("text_encoder", "language_base"):
        made, expected = (path / "backbones" / name for path in (tmp_path, work))
        made, expected = (load_file(path / "model.safetensors") for path in (made, expected))
        assert all(torch.equal(made[key], value) for key, value in expected.items())


# ---- what goes wrong


def test_a_changed_setting_is_refused(work):
    with pytest.raises(CheckpointError, match=r"train\.lr: \S+ -> 0\.5.*new directory"):
        run("scripts.train_stage1", "stage1_warmup", work, *SHORT, "train.lr=0.5")


def test_a_changed_parent_is_refused(work, tmp_path):
    """The base that the run builds on was trained again."""
    shutil.copytree(work / "runs/stage1_warmup", tmp_path / "run")
    path = work / "backbones/video_base/config.json"
    before = path.read_bytes()
    try:
        path.write_bytes(before + b"\n")
        with pytest.raises(CheckpointError, match="other files.*base changed"):
            run(
                "scripts.train_stage1",
                "stage1_warmup",
                work,
                *SHORT,
                f"train.run={work / 'runs/stage1_warmup'}",
            )
    finally:
        path.write_bytes(before)


def test_features_of_other_networks_are_refused(work, tmp_path):
    name = tmp_path / "image_encoder"
    shutil.copytree(work / "backbones/image_encoder", name)
    file = name / "open_clip_model.safetensors"
    save_file({k: v + 1 for k, v in load_file(file).items()}, file)
    for script, config in (
        ("scripts.train_stage1", "stage1_warmup"),
        ("data_pipeline.features", "features"),
    ):
        with pytest.raises(FeatureError, match="features was made with"):
            run(
                script,
                config,
                work,
                *SHORT,
                f"backbones.image_encoder={name}",
                f"train.run={tmp_path / 'run'}",
            )


def test_a_missing_shard_is_named(work, tmp_path):
    shutil.copytree(work / "data/features", tmp_path / "features")
    (tmp_path / "features/shard_00000.safetensors").unlink()
    with pytest.raises(FeatureError, match="shard_00000.safetensors is missing or damaged"):
        run(
            "scripts.train_stage1",
            "stage1_warmup",
            work,
            *SHORT,
            f"data.features={tmp_path / 'features'}",
            f"train.run={tmp_path / 'run'}",
        )


def test_a_damaged_clip_is_named(work, tmp_path):
    shutil.copytree(work / "data/validation", tmp_path / "validation")
    clip = next((tmp_path / "validation/clips").iterdir())
    clip.write_bytes(clip.read_bytes()[:300])
    with pytest.raises(VideoError, match=f"{clip}: "):
        run(
            "data_pipeline.features",
            "features",
            work,
            f"data.train={work / 'data/validation'}",
            f"data.validation={tmp_path / 'validation'}",
            f"data.features={tmp_path / 'features'}",
        )


@pytest.mark.parametrize(
    ("script", "config", "init", "message"),
    [
        ("train_stage1", "stage1_joint", "stage2", "no ActionAwareEncoder at .*stage2"),
        ("train_stage2", "stage2", "stage3", "no ActionAwareEncoder at .*stage3"),
        ("train_stage3", "stage3", "stage2", "no ActionAwareEncoder at .*stage2"),
        ("predict_states", "stage3", "nowhere", "no weights in .*nowhere.*train.init"),
        ("train_stage2", "stage2", "video_base", "no ActionAwareEncoder at .*video_base"),
    ],
)
def test_a_run_of_another_kind_to_start_from_is_refused(
    work, tmp_path, script, config, init, message
):
    with pytest.raises(CheckpointError, match=message):
        run(
            f"scripts.{script}",
            config,
            work,
            *SHORT,
            f"train.init={work / 'runs' / init}",
            f"train.run={tmp_path / 'run'}",
        )


@pytest.mark.parametrize("script", ["train_stage2", "train_stage3", "predict_states"])
def test_a_stage_that_needs_another_says_so(work, tmp_path, script):
    config = "stage2" if script == "train_stage2" else "stage3"
    with pytest.raises(ValueError, match="needs train.init: the run of stage 1"):
        run(
            f"scripts.{script}",
            config,
            work,
            *SHORT,
            "train.init=null",
            f"train.run={tmp_path / 'run'}",
        )


def test_predictions_are_made_by_one_process(work, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="2 processes would write the same file: start one"):
        run("scripts.predict_states", "stage3", work)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_damaged_weights_to_start_from_are_refused(work, tmp_path, part, damage):
    shutil.copytree(exported(work / "runs/stage1_joint"), tmp_path / "weights")
    path = tmp_path / "weights" / part / "diffusion_pytorch_model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
        message = f"weights/{part}: not a whole"
    else:
        kept = load_file(path)
        del kept[sorted(kept)[0]]
        save_file(kept, path)
        message = f"weights/{part}: weight .* is missing"
    with pytest.raises(CheckpointError, match=message):
        run(
            "scripts.train_stage1",
            "stage1_joint",
            work,
            *SHORT,
            f"train.init={tmp_path / 'weights'}",
            f"train.run={tmp_path / 'run'}",
        )


def stage3(work, tmp_path, init, predictions):
    run(
        "scripts.train_stage3",
        "stage3",
        work,
        *SHORT,
        f"train.init={work / 'runs' / init}",
        f"data.predictions={predictions}",
        f"train.run={tmp_path / 'run'}",
    )


def test_predictions_of_another_encoder_are_refused(work, tmp_path):
    with pytest.raises(CheckpointError, match="another encoder than .*predict_states"):
        stage3(work, tmp_path, "stage1_warmup", work / "data" / "own")


def test_unfinished_predictions_are_refused(work, tmp_path):
    with pytest.raises(FeatureError, match="no features in .*none"):
        stage3(work, tmp_path, "stage1_joint", tmp_path / "none")
    shutil.copytree(work / "data/own", tmp_path / "own")
    (tmp_path / "own/null.safetensors").unlink()
    with pytest.raises(FeatureError, match="no .*null.safetensors: run .* to its end"):
        stage3(work, tmp_path, "stage1_joint", tmp_path / "own")
    with pytest.raises(FeatureError, match="predictions was made with|own was made with"):
        run(
            "scripts.predict_states",
            "stage3",
            work,
            f"train.init={work / 'runs' / 'stage1_warmup'}",
        )
