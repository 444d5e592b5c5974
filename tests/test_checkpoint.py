"""Run directories and model directories: whole or not at all, strict, never unpickled."""

from __future__ import annotations

import errno
import json
import os
import pickle

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import (
    CheckpointError,
    RunDirectory,
    exported,
    fingerprint,
    load_model,
    replace_directory,
    tensors_fingerprint,
)
from animegamer.config import Config, TrainConfig, load
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.patch_autoencoder import PatchAutoencoder

STATE = {"parents": {}, "finished": False}


def run_directory(path, **train):
    return RunDirectory(path, Config(train=TrainConfig(**train)))


def save(run, step, keep=3, content=b"weights"):
    return run.save(step, STATE, lambda d: (d / "w").write_bytes(content), keep)


# ---- run directories


def test_a_new_run_writes_its_whole_configuration(tmp_path):
    run = run_directory(tmp_path / "deep" / "run", lr=0.5)
    assert run.latest() is None and run.steps() == []
    assert load(tmp_path / "deep" / "run" / "config.yaml").train.lr == 0.5


def test_a_run_from_before_a_setting_came_goes_on_with_its_default(tmp_path):
    run_directory(tmp_path, lr=0.5)
    file = tmp_path / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    del stored["train"]["matrix_lr"], stored["plan"]
    file.write_text(yaml.safe_dump(stored))
    run_directory(tmp_path, lr=0.5)
    with pytest.raises(CheckpointError, match=r"another configuration: train\.matrix_lr: 0"):
        run_directory(tmp_path, lr=0.5, matrix_lr=0.1)


def test_a_setting_that_is_gone_counts_as_changed(tmp_path):
    run_directory(tmp_path)
    file = tmp_path / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    stored["train"]["momentum"] = 0.9
    file.write_text(yaml.safe_dump(stored))
    with pytest.raises(CheckpointError, match=r"another configuration: train\.momentum"):
        run_directory(tmp_path)


def test_saves_finds_and_prunes(tmp_path):
    run = run_directory(tmp_path)
    for step in (5, 10, 15, 20):
        directory = save(run, step, keep=2, content=bytes([step]))
    assert directory == run.checkpoint(20) == tmp_path / "step_0000020"
    assert run.steps() == [15, 20]
    latest, state = run.latest()
    assert latest == directory and state == {"step": 20, **STATE}
    assert (latest / "w").read_bytes() == bytes([20])


def test_steps_are_ordered_as_numbers(tmp_path):
    run = run_directory(tmp_path)
    for step in (9_999_999, 10_000_000):
        save(run, step)
        (run.checkpoint(step) / "export").mkdir()
    assert run.latest()[1]["step"] == 10_000_000
    assert exported(tmp_path) == run.checkpoint(10_000_000) / "export"


def test_what_is_no_checkpoint_is_passed_over(tmp_path):
    run = run_directory(tmp_path)
    save(run, 5)
    (tmp_path / "step_0000010").mkdir()  # no state.json: copied by half
    (tmp_path / "step_old").mkdir()
    (tmp_path / ".step_0000015.77").mkdir()
    assert run.steps() == [5]


def test_saving_a_step_again_replaces_it(tmp_path):
    run = run_directory(tmp_path)
    save(run, 5, content=b"a")
    save(run, 5, content=b"b")
    assert (run.checkpoint(5) / "w").read_bytes() == b"b" and run.steps() == [5]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyError("x")])
def test_a_failed_save_leaves_nothing_and_prunes_nothing(tmp_path, error):
    run = run_directory(tmp_path)
    save(run, 5)

    def write(directory):
        (directory / "half").write_bytes(b"half")
        raise error

    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyError):
        run.save(10, STATE, write, keep=1)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["config.yaml", "step_0000005"]


def test_state_is_written_last(tmp_path):
    run = run_directory(tmp_path)
    run.save(5, STATE, lambda d: (d / "seen").write_text(str(os.listdir(d))), keep=1)
    assert (run.checkpoint(5) / "seen").read_text() == "[]"


def test_another_configuration_is_refused(tmp_path):
    run_directory(tmp_path, lr=0.1, seed=1)
    with pytest.raises(CheckpointError) as caught:
        run_directory(tmp_path, lr=0.2, seed=2)
    assert "train.lr: 0.1 -> 0.2; train.seed: 1 -> 2" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    run_directory(tmp_path, lr=0.1, seed=1, keep=9, threads=2, save_every=1, run="moved")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"step": 5}'])
def test_a_damaged_state_is_named(tmp_path, content):
    run = run_directory(tmp_path)
    (save(run, 5) / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"step_0000005/state.json is damaged.*delete"):
        run.latest()


# ---- directories of models


def test_replaces_a_directory_as_a_whole(tmp_path):
    target = tmp_path / "models" / "encoder"
    replace_directory(target, lambda d: (d / "old").write_text("1"))
    (tmp_path / "models" / ".encoder.999").mkdir()  # by a killed process
    replace_directory(target, lambda d: (d / "new").write_text("2"))
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path / "models") == ["encoder"]


def test_a_directory_that_cannot_be_replaced_stays(tmp_path):
    target = tmp_path / "encoder"
    replace_directory(target, lambda d: (d / "old").write_text("1"))

    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot write .*encoder.*No space left"):
        replace_directory(target, full)
    assert os.listdir(tmp_path) == ["encoder"] and os.listdir(target) == ["old"]


def test_exported_finds_a_checkpoint_or_the_newest_of_a_run(tmp_path):
    (tmp_path / "public" / "mllm").mkdir(parents=True)
    assert exported(tmp_path / "public") == tmp_path / "public"
    run = run_directory(tmp_path / "run")
    for step in (5, 10):
        run.save(step, STATE, lambda d: (d / "export").mkdir(), keep=5)
    assert exported(tmp_path / "run") == run.checkpoint(10) / "export"
    for path in (tmp_path / "none", tmp_path / "run" / "step_0000005"):
        with pytest.raises(CheckpointError, match=f"no weights in {path}.*train.init"):
            exported(path)


def test_fingerprint_follows_names_and_content(tmp_path, write):
    write("m/a.bin", b"1")
    write("m/sub/b.bin", b"2")
    first = fingerprint(tmp_path / "m")
    write("m/.lock", b"x")
    assert fingerprint(tmp_path / "m") == first
    write("m/a.bin", b"2")
    second = fingerprint(tmp_path / "m")
    write("m/a.bin", b"1")
    assert second != first == fingerprint(tmp_path / "m")
    (tmp_path / "m" / "a.bin").rename(tmp_path / "m" / "c.bin")
    assert fingerprint(tmp_path / "m") not in (first, second)
    assert fingerprint(tmp_path / "m" / "c.bin") != fingerprint(tmp_path / "m" / "sub" / "b.bin")
    with pytest.raises(CheckpointError, match="nothing at .*check the path"):
        fingerprint(tmp_path / "none")


def test_fingerprint_of_a_large_file_sees_size_head_and_tail(tmp_path):
    path, seen = tmp_path / "large", set()
    for size, place in (
        (65_000_000, None),
        (65_000_001, None),
        (65_000_001, 5),
        (65_000_001, 65_000_000),
    ):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        seen.add(fingerprint(path))
    assert len(seen) == 4


def test_tensors_fingerprint_leaves_out_what_does_not_count(tmp_path):
    weights = {"encoder.w": torch.ones(2), "decoder.w": torch.ones(2)}
    seen = []
    for change in ({}, {"decoder.w": torch.zeros(2)}, {"encoder.w": torch.zeros(2)}):
        save_file({**weights, **change}, tmp_path / "model.safetensors")
        seen.append(tensors_fingerprint(tmp_path, without=("decoder.",)))
    assert seen[0] == seen[1] != seen[2]
    with pytest.raises(CheckpointError, match="no weights in"):
        tensors_fingerprint(tmp_path, without=("decoder.", "encoder."))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        tensors_fingerprint(tmp_path)


# ---- strict loading


@pytest.fixture
def encoder(tmp_path):
    sizes = {"text_tokens": 2, "visual_tokens": 4, "text_width": 8, "image_width": 6, "width": 16}
    ActionAwareEncoder(**sizes).save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def change(directory, **tensors):
    path = directory / "diffusion_pytorch_model.safetensors"
    weights = {**load_file(path), **{k.replace("__", "."): v for k, v in tensors.items()}}
    save_file({k: v for k, v in weights.items() if v is not None}, path)


def test_loads_what_was_saved(encoder):
    model = load_model(ActionAwareEncoder, encoder)
    weights = load_file(encoder / "diffusion_pytorch_model.safetensors")
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_a_missing_weight_is_no_random_one(encoder):
    change(encoder, text__norm__weight=None)
    with pytest.raises(CheckpointError, match="encoder: weight text.norm.weight is missing"):
        load_model(ActionAwareEncoder, encoder)


def test_an_unexpected_weight_is_an_error_unless_it_may_be_there(encoder):
    change(encoder, other__w=torch.zeros(1))
    with pytest.raises(CheckpointError, match="weight other.w is unexpected.*another model"):
        load_model(ActionAwareEncoder, encoder)
    load_model(ActionAwareEncoder, encoder, unused=r"other\.")


def test_a_weight_of_another_shape_is_an_error(encoder):
    change(encoder, text__norm__weight=torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"not a whole ActionAwareEncoder \(.*norm.weight"):
        load_model(ActionAwareEncoder, encoder)


@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_damaged_weights_are_named(encoder, content):
    path = encoder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(CheckpointError, match=f"{encoder}: not a whole ActionAwareEncoder"):
        load_model(ActionAwareEncoder, encoder)


@pytest.mark.parametrize("content", ["{", None])
def test_damaged_settings_are_named(encoder, content):
    path = encoder / "config.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=f"{encoder}: not a whole ActionAwareEncoder"):
        load_model(ActionAwareEncoder, encoder)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no AnimationDecoder at .*decoder: run the step"):
        load_model(AnimationDecoder, tmp_path / "decoder")


@pytest.mark.parametrize("kind", [AnimationDecoder, PatchAutoencoder])
def test_a_foreign_model_is_refused(encoder, kind):
    if kind is AnimationDecoder:  # its own sizes, or 1.7 billion weights are made first
        about = json.loads((encoder / "config.json").read_text())
        small = {"num_attention_heads": 1, "attention_head_dim": 16, "num_layers": 1}
        (encoder / "config.json").write_text(json.dumps({**about, **small}))
    with pytest.raises(CheckpointError, match="weight .* is missing.*another model"):
        load_model(kind, encoder)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_is_never_loaded(encoder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (encoder / "diffusion_pytorch_model.safetensors").unlink()
    (encoder / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="not a whole ActionAwareEncoder"):
        load_model(ActionAwareEncoder, encoder)
    assert not (tmp_path / "exploded").exists()
