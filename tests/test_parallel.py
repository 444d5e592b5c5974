"""Several processes over gloo: DDP and FSDP2 compute what one does, and resume each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from animegamer import zero
from animegamer.checkpoint import CheckpointError
from animegamer.config import ConfigError, TrainConfig, load
from animegamer.parallel import LaunchError, PeerError, peers
from animegamer.schedule import SampleSchedule
from animegamer.train_state import Stored
from tests import ranks
from tests.rank_work import train_toy, train_toy_with_zero

ROOT = Path(__file__).parents[1]
MUON = {"matrix_lr": 0.05}
PARTS = ("trained", "average", "optimizer", "export/net")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate remembers the first precision of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def lines(path):
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if "time" not in k and "seconds" not in k} for r in found]


def state(path, step=6):
    return json.loads((path / f"step_{step:07d}/state.json").read_text())


def assert_close(one, other, step=6):
    """The same log and the same checkpoint, up to the order in which floats were added."""
    assert len(lines(one)) == len(lines(other)) == 8
    for a, b in zip(lines(one), lines(other), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    parts = [part for part in PARTS if (one / f"step_{step:07d}/{part}.safetensors").is_file()]
    assert len(parts) >= 3
    for part in parts:
        file = f"step_{step:07d}/{part}.safetensors"
        a, b = load_file(one / file), load_file(other / file)
        assert a.keys() == b.keys()
        for name, value in a.items():
            torch.testing.assert_close(value, b[name], rtol=1e-4, atol=1e-5, msg=f"{part}: {name}")


def alone(path, **settings):
    train_toy(path, {"batch_size": 4, **settings})
    return path


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    AcceleratorState._reset_state(True)
    return alone(tmp_path_factory.mktemp("single") / "run")


# ---- the same training


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, single, mode):
    found = ranks.run(2, train_toy, tmp_path, {"parallel": mode})
    assert_close(single, tmp_path)
    assert [f["finished"] for f in found] == [True, True]
    seen = [set(f["seen"]) for f in found]
    assert seen[0].isdisjoint(seen[1]) and seen[0] | seen[1] == set(range(6 * 4))
    assert sorted(p.name for p in tmp_path.glob("sheet_*")) == ["sheet_3", "sheet_6"]
    assert f"{mode}: processes 2" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_four_processes_train_as_one(tmp_path, single, mode):
    ranks.run(4, train_toy, tmp_path, {"parallel": mode, "batch_size": 1})
    assert_close(single, tmp_path)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_micro_batches_count_by_what_is_in_them(tmp_path, single, mode):
    ranks.run(2, train_toy, tmp_path, {"parallel": mode, "batch_size": 1, "accumulate": 2})
    assert_close(single, tmp_path)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_muon_updates_whole_matrices(tmp_path, mode):
    one = alone(tmp_path / "one", **MUON)
    ranks.run(2, train_toy, tmp_path / "two", {"parallel": mode, **MUON})
    assert_close(one, tmp_path / "two")


def test_a_process_holds_its_share_of_every_parameter(tmp_path):
    found = ranks.run(2, train_toy, tmp_path, {"parallel": "fsdp", "steps": 3})
    sizes = found[0]["parameters"]
    total = sum(sizes.values())
    assert all(f["sharded"] == sizes.keys() for f in found)
    assert sum(f["held"] for f in found) == total
    assert all(0.35 * total < f["held"] < 0.65 * total for f in found)
    # The export is what the shards make, its averages apart: what is frozen has none.
    exported = load_file(tmp_path / "step_0000003/export/net.safetensors")
    assert exported.keys() == sizes.keys()
    frozen = torch.tensor(found[0]["gathered"]["frozen.weight"])
    assert torch.equal(exported["frozen.weight"], frozen)
    trained = load_file(tmp_path / "step_0000003/trained.safetensors")
    for name, value in trained.items():
        assert torch.equal(value, torch.tensor(found[1]["gathered"][name])), name


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_processes_read_disjoint_samples_without_gaps(processes, accumulate, share):
    train = TrainConfig(
        steps=10, batch_size=3, accumulate=accumulate, first_frame_share=share, first_frame_batch=5
    )
    schedule, cursor, read = SampleSchedule(train, processes), 0, []
    for step in range(train.steps):
        assert cursor == schedule.before(step)
        size, frames = schedule.micro_batch(step)
        assert (size, frames) == ((5, 1) if step < round(10 * share) else (3, None))
        each = [schedule.firsts(step, cursor, process) for process in range(processes)]
        read += [
            i
            for part in zip(*each, strict=True)
            for first in part
            for i in range(first, first + size)
        ]
        cursor += schedule.samples(step)
    assert read == list(range(cursor))


def test_without_its_own_size_a_first_frame_batch_has_the_other():
    train = TrainConfig(steps=4, batch_size=3, first_frame_share=0.5)
    assert SampleSchedule(train).micro_batch(0) == (3, 1)


def test_the_padding_of_zero_is_no_part_of_a_parameter(monkeypatch):
    """Nobody fills it: it may well be no number."""
    parameter = SimpleNamespace(ds_tensor=torch.tensor([5.0, 6.0, 7.0, torch.nan]), ds_numel=7)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert zero.local(parameter).tolist() == [5.0, 6.0, 7.0]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_as_one_and_goes_on(tmp_path, stage):
    """DeepSpeed's own code, with Accelerate's choice of devices put out of the way."""
    one = alone(tmp_path / "one", ema_decay=0.0)
    environ = {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "DS_ACCELERATOR": "cpu",
    }
    for name, settings in (("two", {}), ("parts", {"batch_size": 1, "accumulate": 2})):
        run = tmp_path / name
        ranks.run(2, train_toy_with_zero, stage, run, settings, timeout=300, **environ)
        assert_close(one, run)
    shutil.rmtree(tmp_path / "two/step_0000006")
    ranks.run(2, train_toy_with_zero, stage, tmp_path / "two", {}, timeout=300, **environ)
    assert_close(one, tmp_path / "two")
    shutil.rmtree(tmp_path / "two/step_0000006")
    alone(tmp_path / "two", ema_decay=0.0)  # in one process, without DeepSpeed
    assert_close(one, tmp_path / "two")


# ---- checkpoints, and other numbers of processes


def test_shards_hold_what_whole_files_do_and_are_read_by_any_number(tmp_path, single):
    """Two processes write shards; one goes on with them, and four read whole files."""
    run = tmp_path / "run"
    ranks.run(2, train_toy, run, {"parallel": "fsdp", "checkpoint": "sharded"})
    last = run / "step_0000006"
    names = {
        f"{part}-0000{i}-of-00002.safetensors"
        for part in ("trained", "average", "optimizer")
        for i in (1, 2)
    }
    assert {f.name for f in last.glob("*.safetensors")} == names
    for part in ("trained", "average", "optimizer"):
        shards, whole = Stored(last, part), load_file(single / f"step_0000006/{part}.safetensors")
        assert shards.keys() == whole.keys()
        for name, value in whole.items():
            assert shards.shape(name) == tuple(value.shape)
            torch.testing.assert_close(shards.rows(name), value, rtol=1e-4, atol=1e-5, msg=name)
    shutil.rmtree(last)
    train_toy(run, {"batch_size": 4})
    assert_close(single, run)


def test_a_run_goes_on_with_other_processes_and_in_another_mode(tmp_path, single):
    """One process, then two in shards, then one again: samples and results as if nothing was."""
    shutil.copytree(single, tmp_path / "run")
    run = tmp_path / "run"
    for step in (3, 6):
        assert state(run, step)["samples"] == 4 * step
    shutil.rmtree(run / "step_0000006")
    found = ranks.run(2, train_toy, run, {"parallel": "fsdp"})
    assert_close(single, run)
    assert sorted(i for f in found for i in f["seen"]) == list(range(12, 24))
    assert state(run)["split"]["processes"] == 2
    shutil.rmtree(run / "step_0000006")
    found = ranks.run(2, train_toy, run, {"parallel": "ddp", "batch_size": 1, "accumulate": 2})
    assert_close(single, run)


def test_with_more_processes_alone_a_run_goes_on_with_the_next_sample(tmp_path, single):
    """Steps see more samples then; none is left out or comes twice."""
    shutil.copytree(single, tmp_path / "run")
    run = tmp_path / "run"
    shutil.rmtree(run / "step_0000006")
    found = ranks.run(2, train_toy, run, {"batch_size": 4})
    assert sorted(i for f in found for i in f["seen"]) == list(range(12, 12 + 3 * 8))
    assert state(run)["samples"] == 36
    assert "processes 2, accumulate 1, batch_size 4" in (run / "train.log").read_text()


def test_other_samples_a_step_by_configuration_are_refused(tmp_path, single):
    shutil.copytree(single, tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"train.batch_size: 4 -> 2. Its steps saw 4 samples, these 2"
    ):
        train_toy(tmp_path / "run", {"batch_size": 2})
    train_toy(tmp_path / "run", {"batch_size": 2, "accumulate": 2})


def test_a_run_of_before_samples_were_counted_goes_on(tmp_path, single):
    shutil.copytree(single, tmp_path / "run")
    run = tmp_path / "run"
    shutil.rmtree(run / "step_0000006")
    path = run / "step_0000003/state.json"
    old = json.loads(path.read_text())
    del old["samples"], old["split"]
    path.write_text(json.dumps(old))
    with pytest.raises(CheckpointError, match="batch_size: 4 -> 3"):
        train_toy(run, {"batch_size": 3})
    train_toy(run, {"batch_size": 4})
    assert_close(single, run)


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_damaged_shard_is_told(tmp_path, damage):
    ranks.run(2, train_toy, tmp_path, {"parallel": "fsdp", "checkpoint": "sharded", "steps": 3})
    shard = tmp_path / "step_0000003/trained-00002-of-00002.safetensors"
    if damage == "lost":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="step_0000003 is damaged .*delete it"):
        train_toy(tmp_path, {"batch_size": 4, "steps": 3})


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_one_process_is_asked_to_stop_and_all_save_after_the_same_step(tmp_path, single, mode):
    settings = {"parallel": mode}
    found = ranks.run(2, train_toy, tmp_path, settings, "SIGTERM")
    assert [f["finished"] for f in found] == [False, False]
    assert state(tmp_path, 5)["finished"] is False
    ranks.run(2, train_toy, tmp_path, settings)
    assert_close(single, tmp_path)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_weight_that_is_no_number_in_one_process_ends_all(tmp_path, mode):
    with pytest.raises(ranks.RankError, match="FloatingPointError|PeerError"):
        ranks.run(2, train_toy, tmp_path, {"parallel": mode, "log_every": 50}, "nan")
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_0000003"]


def torchrun(directory, *arguments, **environ):
    """The output of two processes of ``rank_work.py`` that are expected to fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(ranks.free_port()), str(ROOT / "tests/rank_work.py")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    result = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1, result.stderr
    assert [p.name for p in directory.glob("step_*")] == ["step_0000003"]
    return result.stderr


def test_a_killed_process_ends_the_job_with_what_happened(tmp_path):
    """As when the machine runs out of memory."""
    said = torchrun(tmp_path, "fsdp", str(tmp_path), "30", "SIGKILL")
    assert "PeerError: another process of this run died" in said
    assert "rank      : 1" in said and "Signal 9 (SIGKILL)" in said
    ranks.run(2, train_toy, tmp_path, {"parallel": "fsdp"})
    assert state(tmp_path)["finished"] is True


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_process_that_hangs_is_not_waited_for_forever(tmp_path, mode):
    quick = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}  # for the stopped one, before it is killed
    said = torchrun(tmp_path, mode, str(tmp_path), "0.1", "SIGSTOP", **quick)
    assert "did not answer within train.timeout_minutes" in said and "6000ms" in said


# ---- what was asked for, and what was started


def test_fewer_processes_than_asked_for_are_refused(tmp_path):
    with pytest.raises(LaunchError, match="train.processes is 2, but 1 started: .*torchrun"):
        train_toy(tmp_path, {"processes": 2})


def test_fsdp_in_one_process_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="one process cannot shard"):
        train_toy(tmp_path, {"parallel": "fsdp"})


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_accelerates_own_fsdp_is_refused(tmp_path, monkeypatch, mode):
    """On CPUs it would be DDP."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="Accelerate's FSDP.*train.parallel=fsdp"):
        train_toy(tmp_path, {"parallel": mode})


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without GPUs")
def test_processes_that_would_train_apart_are_refused(tmp_path):
    """Without a GPU, and not told to use CPUs, each is for Accelerate the only one."""
    with pytest.raises(
        ranks.RankError, match="LaunchError: asked for ddp with 2 processes, got NO"
    ):
        ranks.run(2, train_toy, tmp_path, {}, ACCELERATE_USE_CPU="false")


def test_deepspeed_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = {"parallel": "deepspeed", "ema_decay": 0.0}
    with pytest.raises(LaunchError, match=r"pip install -e '\.\[deepspeed\]'"):
        train_toy(tmp_path, settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(LaunchError, match="does not ask for DeepSpeed: .*deepspeed_zero2.yaml"):
        train_toy(tmp_path, settings)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LaunchError, match="train.parallel is ddp, but the launcher asks"):
        train_toy(tmp_path, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.checkpoint=sharded"], "only fsdp has shards"),
        (["train.parallel=fsdp", "train.precision=fp16"], "bf16 or no"),
        (["train.parallel=deepspeed", "train.ema_decay=0.9"], "train.ema_decay is 0.9"),
        (["train.parallel=deepspeed", "train.matrix_lr=0.1"], "train.matrix_lr is 0.1"),
        (["train.timeout_minutes=0"], "timeout above 0"),
        (["train.processes=-1"], "processes >= 0"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(None, settings)


def test_errors_of_our_own_are_not_taken_for_a_peers():
    with pytest.raises(RuntimeError, match="shapes") as caught, peers():
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, PeerError)
    with pytest.raises(PeerError, match="same command goes on"), peers():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer")
