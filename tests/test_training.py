"""The training loop on a toy model: known answers, and resuming as if nothing had happened."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import nn

from animegamer import train_state
from animegamer.checkpoint import CheckpointError
from animegamer.config import Config, TrainConfig
from animegamer.schedule import learning_rate_factor
from animegamer.train_state import Average
from animegamer.training import fit, select_trainable
from animegamer.training_log import Log

SAVED = ("trained", "average", "optimizer")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate remembers the first precision of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Batch(self.x.to(device))


class Toy(nn.Module):
    """Denoises points; ``noise`` draws from torch's generator, as the diffusion loss does."""

    def __init__(self, noise=0.1, hidden=8):
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Linear(3, hidden)
        self.decoder = nn.ModuleDict(
            {"attention": nn.Linear(hidden, hidden), "out": nn.Linear(hidden, 3)}
        )
        self.frozen = nn.Linear(3, 3)
        self.noise, self.seen, self.at = noise, 0, {}

    def forward(self, batch):
        self.seen += 1
        self.at.get(self.seen, lambda: None)()
        x = batch.x + self.noise * torch.randn_like(batch.x)
        h = torch.tanh(self.decoder["attention"](torch.tanh(self.encoder(x))))
        loss = (self.decoder["out"](h) + self.frozen(x) - batch.x).square().mean()
        return loss, {"size": float(len(batch.x))}


def batch(first, size):
    draw = torch.Generator()
    rows = [torch.randn(3, generator=draw.manual_seed(first + i)) for i in range(size)]
    return Batch(torch.stack(rows))


def toy_config(path, **settings):
    values = {
        "trainable": ("encoder", "decoder"),
        "steps": 10,
        "batch_size": 4,
        "lr": 0.01,
        "warmup_steps": 3,
        "ema_decay": 0.9,
        "save_every": 3,
        "log_every": 4,
        "keep": 2,
        "threads": 1,
    }
    return Config(train=TrainConfig(run=str(path), **{**values, **settings}))


def train(config, *arguments, **named):
    """Fits; the newest checkpoint."""
    fit(config, *arguments, **named)
    return sorted(Path(config.train.run).glob("step_*"))[-1]


def tensors(directory):
    return {part: load_file(directory / f"{part}.safetensors") for part in SAVED}


def assert_same(one, other):
    one, other = tensors(one), tensors(other)
    for part in SAVED:
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), f"{part}: {name}"


def lines(path):
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "time" not in k and "seconds" not in k} for line in found
    ]


class Killed(BaseException):
    """Ends a run as a kill would: nothing after it runs but what any exception runs."""


def kill():
    raise Killed


# ---- learning rate, what trains, averages


def test_learning_rate_rises_and_stays():
    config = TrainConfig(steps=10, warmup_steps=4, schedule="constant")
    assert [learning_rate_factor(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_learning_rate_falls_along_a_cosine():
    config = TrainConfig(steps=14, warmup_steps=4, schedule="cosine", min_lr_share=0.1)
    known = {0: 0.25, 3: 1, 4: 1, 9: 0.55, 14: 0.1, 20: 0.1}
    for step, factor in known.items():
        assert learning_rate_factor(config, step) == pytest.approx(factor)


def test_without_warmup_the_first_step_has_the_whole_rate():
    assert learning_rate_factor(TrainConfig(warmup_steps=0), 0) == 1


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"proj": nn.Linear(2, 2)})
        attention = nn.ModuleDict(
            {
                "lora_A": nn.Linear(2, 2, False),
                "lora_B": nn.Linear(2, 2, False),
                "base": nn.Linear(2, 2, False),
            }
        )
        self.decoder = nn.ModuleDict({"attention": attention, "ofs_embedding": nn.Linear(2, 2)})
        self.decoder_two = nn.Linear(2, 2)


def test_select_trainable_by_module_and_by_part_of_a_name():
    model = Named()
    groups = select_trainable(model, ("encoder", "decoder.lora", "decoder.ofs_embedding"))
    assert groups == {
        "encoder": ["encoder.proj.weight", "encoder.proj.bias"],
        "decoder.lora": ["decoder.attention.lora_A.weight", "decoder.attention.lora_B.weight"],
        "decoder.ofs_embedding": ["decoder.ofs_embedding.weight", "decoder.ofs_embedding.bias"],
    }
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {name for names in groups.values() for name in names}


def test_a_later_entry_wins():
    groups = select_trainable(Named(), ("decoder", "decoder.lora"))
    assert groups["decoder"] == [
        "decoder.attention.base.weight",
        "decoder.ofs_embedding.weight",
        "decoder.ofs_embedding.bias",
    ]
    assert len(groups["decoder.lora"]) == 2


def test_an_entry_may_name_a_module_of_every_block():
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    for block in model.decoder.blocks:
        block.norm1 = nn.ModuleDict({"linear": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    groups = select_trainable(model, ("decoder.norm1.linear",))
    assert groups["decoder.norm1.linear"] == [
        f"decoder.blocks.{i}.norm1.linear.{name}" for i in range(2) for name in ("weight", "bias")
    ]
    assert not model.decoder.blocks[0].norm1["norm"].weight.requires_grad


def test_select_trainable_freezes_again():
    model = Named()
    select_trainable(model, ("decoder",))
    select_trainable(model, ("encoder",))
    assert not any(p.requires_grad for p in model.decoder.parameters())


def test_weights_under_lora_do_not_train_by_accident():
    model = nn.Module()
    model.mllm = nn.ModuleDict({"q_proj": nn.ModuleDict({"base_layer": nn.Linear(2, 2)})})
    model.mllm["q_proj"]["lora_A"] = nn.Linear(2, 2, False)
    assert list(select_trainable(model, ("mllm.lora",))["mllm.lora"])
    with pytest.raises(ValueError, match=r"'mllm' takes 2 weights .* name mllm.lora .* rank to 0"):
        select_trainable(model, ("mllm",))


@pytest.mark.parametrize("entry", ["decode", "decoder.motion_scope", "lora", ""])
def test_an_entry_that_matches_nothing_is_an_error(entry):
    with pytest.raises(ValueError, match=f"'{entry}' matches no parameter of encoder, decoder"):
        select_trainable(Named(), ("encoder", entry))


def test_nothing_to_train_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train.trainable is empty"):
        fit(toy_config(tmp_path, trainable=()), Toy(), batch)


def test_the_table_says_what_trains(tmp_path):
    fit(toy_config(tmp_path, steps=1), Toy(), batch)
    log = (tmp_path / "train.log").read_text()
    assert "encoder" in log and f"{8 * 4 + 8 * 9 + 9 * 3} of {8 * 4 + 8 * 9 + 9 * 3 + 12}" in log


def test_average_known_answer():
    parameter = nn.Parameter(torch.tensor([1.0]))
    average = Average({"p": parameter}, 0.5)
    parameter.data.fill_(3.0)
    average.update(1)  # decay is min(0.5, 2 / 11)
    assert average.shadow["p"].item() == pytest.approx(1 * 2 / 11 + 3 * 9 / 11)
    average.shadow["p"].fill_(1.0)
    average.update(100)
    assert average.shadow["p"].item() == pytest.approx(2.0)


def test_average_swaps_both_ways():
    parameter = nn.Parameter(torch.tensor([1.0]))
    average = Average({"p": parameter}, 0.9)
    average.shadow["p"].fill_(7.0)
    average.swap()
    assert (parameter.item(), average.shadow["p"].item()) == (7.0, 1.0)
    average.swap()
    assert (parameter.item(), average.shadow["p"].item()) == (1.0, 7.0)


def test_without_a_decay_there_is_no_average(tmp_path):
    directory = train(toy_config(tmp_path, ema_decay=0.0, steps=1), Toy(), batch)
    assert not (directory / "average.safetensors").exists()


# ---- the loop


def test_it_learns_and_only_what_is_named(tmp_path):
    model = Toy()
    frozen = model.frozen.weight.clone()
    fit(toy_config(tmp_path, steps=200, log_every=10, save_every=1000), model, batch)
    losses = [line["loss"] for line in lines(tmp_path)]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(model.frozen.weight, frozen)


def test_accumulated_batches_equal_a_larger_one(tmp_path):
    parts = train(toy_config(tmp_path / "parts", accumulate=2, batch_size=2), Toy(noise=0), batch)
    whole = train(toy_config(tmp_path / "whole"), Toy(noise=0), batch)
    for name, value in tensors(whole)["trained"].items():
        torch.testing.assert_close(tensors(parts)["trained"][name], value, atol=1e-5, rtol=1e-4)


def test_validation_sees_averaged_weights_in_eval_mode(tmp_path):
    model, seen = Toy(), []

    def validate(step, directory):
        assert directory == tmp_path and not model.training and not torch.is_grad_enabled()
        seen.append((step, model.encoder.weight.clone()))
        return {"score": step / 2}

    config = toy_config(tmp_path, validate_every=4)
    last = train(config, model, batch, validate=validate)
    assert [step for step, _ in seen] == [4, 8, 10]
    assert torch.equal(seen[-1][1], tensors(last)["average"]["encoder.weight"])
    assert torch.equal(model.encoder.weight, tensors(last)["trained"]["encoder.weight"])
    assert {"step": 4, "validation/score": 2.0} in lines(tmp_path)


def test_export_sees_averaged_weights(tmp_path):
    model = Toy()

    def export(directory):
        directory.mkdir()
        save_file({"w": model.encoder.weight.detach()}, directory / "w.safetensors")

    last = train(toy_config(tmp_path), model, batch, export=export)
    exported = load_file(last / "export" / "w.safetensors")["w"]
    assert torch.equal(exported, tensors(last)["average"]["encoder.weight"])


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    model = Toy()
    model.at[8] = lambda: model.encoder.weight.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="loss is nan before step 8.*train.lr"):
        fit(toy_config(tmp_path), model, batch)
    assert_finite(tmp_path, [3, 6])


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    """Although no line of the log is due before the checkpoint is."""
    model = Toy()
    model.at[8] = lambda: model.encoder.weight.data.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="not finite after step 9.*nothing is saved"):
        fit(toy_config(tmp_path, log_every=100), model, batch)
    assert_finite(tmp_path, [3, 6])


def assert_finite(path, steps):
    assert [int(d.name[5:]) for d in sorted(path.glob("step_*"))] == steps
    for step in steps:
        for values in tensors(path / f"step_{step:07d}").values():
            assert all(value.isfinite().all() for value in values.values())


def test_an_error_in_the_data_reaches_the_caller(tmp_path):
    def broken(first, size):
        if first == 8:
            raise KeyError("no features of 'shot 7'")
        return batch(first, size)

    with pytest.raises(KeyError, match="shot 7"):
        fit(toy_config(tmp_path), Toy(), broken)


# ---- stopping and going on


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    AcceleratorState._reset_state(True)
    path = tmp_path_factory.mktemp("unbroken")
    fit(toy_config(path), Toy(), batch)
    return path


@pytest.mark.parametrize("step", [1, 4, 6, 9, 10])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, unbroken, step):
    model = Toy()
    model.at[step] = kill
    with pytest.raises(Killed):
        fit(toy_config(tmp_path), model, batch)
    torch.manual_seed(step)  # whatever else the new process did
    again = Toy()
    last = train(toy_config(tmp_path), again, batch)
    assert last.name == "step_0000010"
    assert again.seen == 10 - (step - 1) // 3 * 3
    assert_same(last, unbroken / last.name)
    assert lines(tmp_path) == lines(unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_returns(tmp_path, unbroken, number):
    model = Toy()
    model.at[5] = lambda: signal.raise_signal(number)
    before = signal.getsignal(number)
    assert fit(toy_config(tmp_path), model, batch) is False
    last = tmp_path / "step_0000005"
    assert signal.getsignal(number) is before
    assert json.loads((last / "state.json").read_text())["finished"] is False
    assert "stopped at step 5" in (tmp_path / "train.log").read_text()
    assert fit(toy_config(tmp_path), Toy(), batch) is True
    last = tmp_path / "step_0000010"
    assert json.loads((last / "state.json").read_text())["finished"] is True
    assert_same(last, unbroken / last.name)
    assert lines(tmp_path) == lines(unbroken)


def test_a_second_signal_does_not_wait(tmp_path):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    model = Toy()
    model.at[5] = twice
    with pytest.raises(KeyboardInterrupt):
        fit(toy_config(tmp_path), model, batch)


def test_a_finished_run_stays_as_it_is(tmp_path):
    last = train(toy_config(tmp_path), Toy(), batch)
    written = (last / "trained.safetensors").stat().st_mtime_ns
    model = Toy()
    assert train(toy_config(tmp_path), model, batch) == last
    assert model.seen == 0
    assert (last / "trained.safetensors").stat().st_mtime_ns == written
    assert torch.equal(model.encoder.weight, tensors(last)["trained"]["encoder.weight"])


def test_a_changed_configuration_refuses_and_says_what(tmp_path):
    fit(toy_config(tmp_path, steps=4), Toy(), batch)
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.01 -> 0\.02.*new directory"):
        fit(toy_config(tmp_path, steps=4, lr=0.02), Toy(), batch)
    fit(toy_config(tmp_path, steps=4, keep=5, save_every=1), Toy(), batch)  # may change


def test_a_changed_parent_refuses_and_says_which(tmp_path):
    config = toy_config(tmp_path, steps=4)
    fit(config, Toy(), batch, parents={"init": "a", "features": "b"})
    for now in ({"init": "c", "features": "b"}, {"features": "b"}):
        with pytest.raises(CheckpointError, match=r"other files.*\(init changed\).*new directory"):
            fit(config, Toy(), batch, parents=now)
    fit(config, Toy(), batch, parents={"init": "a", "features": "b", "recorded since": "d"})


def test_a_full_disk_leaves_the_older_checkpoints_whole(tmp_path, monkeypatch, unbroken):
    def full(values, path):
        if "0000006" in str(path) and "optimizer" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save_file(values, path)

    monkeypatch.setattr(train_state, "save_file", full)
    with pytest.raises(CheckpointError, match="cannot save .*0000006.*No space left.*make room"):
        fit(toy_config(tmp_path), Toy(), batch)
    assert [d.name for d in tmp_path.glob("*step_*")] == ["step_0000003"]
    monkeypatch.undo()
    assert_same(train(toy_config(tmp_path), Toy(), batch), unbroken / "step_0000010")


def test_a_write_that_fails_inside_safetensors_is_told_alike(tmp_path):
    """Its error is none of the OSErrors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))

    model = Toy(hidden=200)  # more than 200 kB
    model.at[2] = limit
    try:
        with pytest.raises(CheckpointError, match="cannot save .*step_0000003"):
            fit(toy_config(tmp_path), model, batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*step_*"))


def test_what_a_kill_during_saving_left_is_cleared(tmp_path):
    (tmp_path / ".step_0000003.12345").mkdir()
    (tmp_path / ".step_0000003.12345" / "trained.safetensors").write_bytes(b"half")
    fit(toy_config(tmp_path, steps=3), Toy(), batch)
    assert [d.name for d in tmp_path.glob("*step_*")] == ["step_0000003"]


def damage(path, part):
    content = path.read_bytes()
    parts = {"cut": content[: len(content) // 2], "empty": b"", "junk": b"\x00" * 99}
    path.write_bytes(parts[part])


@pytest.mark.parametrize("part", ["cut", "empty", "junk"])
@pytest.mark.parametrize(
    "name", ["trained.safetensors", "average.safetensors", "optimizer.safetensors", "state.json"]
)
def test_a_damaged_checkpoint_is_named_and_can_be_deleted(tmp_path, unbroken, name, part):
    model = Toy()
    model.at[8] = kill
    with pytest.raises(Killed):
        fit(toy_config(tmp_path), model, batch)
    damage(tmp_path / "step_0000006" / name, part)
    with pytest.raises(CheckpointError, match="step_0000006.* is damaged .*delete"):
        fit(toy_config(tmp_path), Toy(), batch)
    for file in (tmp_path / "step_0000006").iterdir():
        file.unlink()
    (tmp_path / "step_0000006").rmdir()
    assert_same(train(toy_config(tmp_path), Toy(), batch), unbroken / "step_0000010")


def test_a_missing_file_is_damage(tmp_path):
    fit(toy_config(tmp_path, steps=3), Toy(), batch)
    (tmp_path / "step_0000003" / "average.safetensors").unlink()
    with pytest.raises(CheckpointError, match="step_0000003 is damaged"):
        fit(toy_config(tmp_path, steps=3), Toy(), batch)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    fit(toy_config(tmp_path, steps=3), Toy(), batch)
    with pytest.raises(CheckpointError, match=r"encoder.weight is \(8, 3\), expected \(9, 3\)"):
        fit(toy_config(tmp_path, steps=3), Toy(hidden=9), batch)
    path = tmp_path / "step_0000003" / "trained.safetensors"
    weights = load_file(path)
    save_file({**weights, "extra": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="another model: extra is unexpected"):
        fit(toy_config(tmp_path, steps=3), Toy(), batch)
    del weights["encoder.bias"]
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="another model: encoder.bias is missing"):
        fit(toy_config(tmp_path, steps=3), Toy(), batch)


# ---- the log


def test_the_log_drops_later_and_broken_lines(tmp_path):
    rows = [
        '{"step": 2, "loss": 1}',
        '{"step": 4, "validation/loss": 1}',
        '{"step": 6, "loss": 1}',
        "null",
        '{"loss": 3}',
        '{"step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    log = Log(tmp_path, TrainConfig(log_every=1), 4)
    log.step(5, torch.tensor(1.0), 0.5, 0.1, {})
    log.close(5, stopped=True)
    kept = lines(tmp_path)
    assert [line["step"] for line in kept] == [2, 4, 5]
    assert kept[-1] == {"step": 5, "loss": 1.0, "grad_norm": 0.5, "lr": 0.1}


def test_a_line_is_the_mean_since_the_last_across_a_checkpoint(tmp_path):
    settings = TrainConfig(log_every=4)
    first = Log(tmp_path, settings, 0)
    for step, loss in ((1, 1.0), (2, 3.0)):
        first.step(step, torch.tensor(loss), 1.0, 0.1, {"other": loss})
    kept = json.loads(json.dumps(first.pending()))
    second = Log(tmp_path, settings, 2, kept)
    for step, loss in ((3, 5.0), (4, 7.0)):
        second.step(step, torch.tensor(loss), 1.0, 0.1, {"other": loss})
    line = {"step": 4, "loss": 4.0, "grad_norm": 1.0, "other": 4.0, "lr": 0.1}
    assert lines(tmp_path) == [line]
    assert second.pending() == {}


def test_validation_time_is_not_counted_as_training(tmp_path):
    log = Log(tmp_path, TrainConfig(log_every=2), 0)
    log.step(1, torch.tensor(1.0), 1.0, 0.1, {})
    time.sleep(0.3)
    log.validation(1, {"loss": 2.0})
    log.step(2, torch.tensor(1.0), 1.0, 0.1, {})
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["seconds_per_step"] < 0.2
