"""Every stage with two processes, through its script: DDP and FSDP2 train what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from animegamer.models.decoder_files import load_decoder
from animegamer.models.mllm import NextStateMLLM
from tests import ranks
from tests.rank_work import train_stage
from tests.tiny_stages import ROOT, overrides

SHORT = [
    "train.steps=4",
    "train.warmup_steps=1",
    "train.save_every=4",
    "train.validate_every=4",
    "train.validation_batches=1",
    "train.samples=2",
    "train.first_frame_share=0",
    "train.precision=no",
]
LORA_DECODER = [
    "decoder.lora={rank: 2, alpha: 2}",
    "train.trainable=[encoder, decoder.lora, decoder.ofs_embedding]",
    "train.init=null",
]
LORA_MLLM = [
    "mllm.lora={rank: 2, alpha: 2}",  # dropout would draw otherwise in every process
    "train.trainable=[mllm.lora, mllm.modules_to_save, mllm.embed_tokens, mllm.lm_head, "
    "mllm.input_projection, mllm.output_projection]",
]
STAGES = {
    "stage1": ["train.first_frame_share=0.5"],
    "stage1 lora": LORA_DECODER,
    "stage2 lora": LORA_MLLM,
    "stage3": [],
}


def inputs(work, stage):
    """What the stages before have left."""
    if stage == "stage1":
        return [f"train.init={work / 'runs/stage1_warmup'}"]
    return [f"train.init={work / 'runs/stage1_joint'}", f"data.predictions={work / 'data/own'}"]


def batches(size):
    return [f"train.batch_size={size}", f"train.first_frame_batch={size}"]


def losses(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module", params=STAGES)
def runs(work, tmp_path_factory, request):
    """One process; two with a copy each; two with shards, which also recompute activations."""
    stage = request.param.split()[0]
    path = tmp_path_factory.mktemp("runs")
    settings = [*SHORT, *inputs(work, stage), *STAGES[request.param]]
    checkpointing = ["decoder.gradient_checkpointing=true", "mllm.gradient_checkpointing=true"]
    ranks.run(1, train_stage, work, stage, [(path / "one", [*settings, *batches(4)])])
    two = [*settings, *batches(2), "train.processes=2"]
    both = [
        (path / "ddp", [*two, "train.parallel=ddp"]),
        (path / "fsdp", [*two, *checkpointing, "train.parallel=fsdp"]),
    ]
    ranks.run(2, train_stage, work, stage, both)
    return request.param, path


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(runs, mode):
    _, path = runs
    assert len(losses(path / "one")) == 4
    assert losses(path / mode) == pytest.approx(losses(path / "one"), rel=2e-4)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_save_what_one_saves(runs, mode):
    _, path = runs
    one = path / "one/step_0000004"
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert len(files) >= 4
    for file in files:
        a, b = load_file(one / file), load_file(path / mode / "step_0000004" / file)
        assert a.keys() == b.keys(), file
        for name, value in a.items():
            # Muon levels singular values, those that are but rounding errors, too: single weights
            # may differ by most of a step, the others hardly.
            apart = (b[name].double() - value.double()).abs()
            largest, mean = float(apart.max()), float(apart.mean())
            assert largest < 1e-2 and mean < 5e-4, (file, name, largest, mean)


@pytest.mark.parametrize("runs", ["stage1 lora", "stage2 lora"], indirect=True)
def test_adapters_embeddings_and_scores_are_whole(runs, work):
    name, path = runs
    export = path / "fsdp/step_0000004/export"
    if name == "stage1 lora":
        adapter = load_file(export / "decoder/adapter/adapter_model.safetensors")
        width = 32
        assert {tuple(t.shape) for t in adapter.values()} == {(2, width), (width, 2)}
        assert all(t.abs().max() > 0 for t in adapter.values())
        decoder = load_decoder(export / "decoder")
        assert decoder.lora_base.resolve() == (work / "backbones/video_base").resolve()
        return
    adapter = load_file(export / "mllm/adapter/adapter_model.safetensors")
    vocabulary = len(NextStateMLLM.from_pretrained(export / "mllm").language.tokenizer)
    wanted = {"embed_tokens": 1, "lm_head": 1, "lora_A": 7, "lora_B": 7, "norm": 3}
    for part, count in wanted.items():
        found = [t for n, t in adapter.items() if part in n]
        assert len(found) == count, part
        assert all(t.numel() and t.abs().max() > 0 for t in found), part
    for part in ("embed_tokens", "lm_head"):
        (found,) = (t for n, t in adapter.items() if part in n)
        assert found.shape[0] == vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_the_commands_of_the_readme(work, tmp_path, stage, mode):
    """Twenty steps under torchrun, with the tiny configurations' own settings."""
    config = {"stage1": "stage1_joint"}.get(stage, stage)
    script = [
        str(ROOT / f"scripts/train_{stage}.py"),
        "--config",
        str(ROOT / f"configs/tiny/{config}.yaml"),
    ]
    settings = [
        "train.steps=20",
        "train.validate_every=20",
        "train.samples=2",
        "train.validation_batches=1",
    ]
    settings += [*overrides(work), *inputs(work, stage)]
    two = [*settings, *batches(2), f"train.run={tmp_path / 'two'}", f"train.parallel={mode}"]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_port", str(ranks.free_port())]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, *script, *two]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ranks.run(1, train_stage, work, stage, [(tmp_path / "one", [*settings, *batches(4)])])
    assert len(losses(tmp_path / "two")) == 20
    # In bfloat16 sums in another order differ more.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)
