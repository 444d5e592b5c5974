"""scripts/plan.py: the published counts, counted; the memory plan against measured memory."""

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from animegamer import config as configuration
from animegamer.config import ConfigError
from animegamer.plan import counts, plan_training, report, stage_of
from animegamer.play_plan import Part, parts, peaks
from benchmarks import gpu_check

ROOT = Path(__file__).parents[1]
FULL = ROOT / "configs" / "full"

SMALL = [*gpu_check.SMALL, "train.batch_size=2", "plan.devices=1"]


@pytest.fixture(scope="module")
def small():
    """Loads a full configuration at small sizes."""

    def load(name, *overrides):
        return configuration.load(FULL / f"{name}.yaml", [*SMALL, *overrides])

    return load


def test_the_published_counts_are_counted():
    found = counts(configuration.load(FULL / "stage2.yaml"))
    assert (found["Mistral"], found["Mistral, trained"]) == (7_328_210_944, 348_622_848)
    mllm = found["MLLM (Mistral and projections)"], found["MLLM, trained"]
    assert mllm == (7_364_415_232, 384_827_136)
    assert found["encoder"] == 16_727_040
    assert found["decoder, without LoRA"] == 1_687_163_840
    assert found["decoder's LoRA"] == 29_491_200
    assert found["decoder's adaLN"] == 354_585_600
    assert found["video autoencoder"] == 215_583_907


def test_another_rank_gives_the_other_counts():
    found = counts(configuration.load(FULL / "stage2.yaml", ["mllm.lora.rank=16"]))
    assert (found["Mistral"], found["Mistral, trained"]) == (7_286_267_904, 306_679_808)


def test_the_stage_follows_from_what_trains():
    stages = {
        name: stage_of(configuration.load(FULL / f"{name}.yaml"))
        for name in ("stage1_webvid", "stage1_warmup", "stage1_joint", "stage2", "stage3", "play")
    }
    assert list(stages.values()) == ["stage1", "stage1", "stage1", "stage2", "stage3", "play"]


def test_sizes_that_are_nowhere_are_named(small, tmp_path):
    with pytest.raises(ConfigError, match=r"no sizes of \w+: neither none/.* nor .*plan.sizes"):
        counts(small("stage2", f"plan.sizes={tmp_path}"))
    (tmp_path / "image_encoder.json").write_text("{")
    with pytest.raises(ConfigError, match="image_encoder.json: not the sizes of image_encoder"):
        plan_training(small("stage2", f"plan.sizes={tmp_path}"))


# ---- the plan against what the allocator of the CPU hands out

MEASURE = """
import json, sys
from contextlib import contextmanager
import torch
from torch.profiler import ProfilerActivity, profile
from animegamer import config as configuration
from animegamer.optimizer import build_optimizer
from animegamer import play_plan
from animegamer.models import skeleton
from animegamer.plan import build, make_batch, stage_of

torch.set_num_threads(1)

@contextmanager
def measured(found):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        yield
    held = peak = 0
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    found["peak"] = peak

for tree in json.load(sys.stdin):
    config = configuration.from_tree(tree)
    found = {}
    if stage_of(config) == "play":
        half = torch.float32
        mllm, (_, decoder) = skeleton.mllm(config), skeleton.encoder_and_decoder(config)
        autoencoder = play_plan.build_autoencoder(config)
        for name, model, run in (
            ("MLLM", mllm, play_plan.mllm_pass(config, mllm)),
            ("decoder", decoder, play_plan.decoder_pass(config, decoder, torch.float32)),
            ("autoencoder", autoencoder, play_plan.autoencoder_pass(config, autoencoder)),
        ):
            model.eval()
            with torch.no_grad(), measured(found):
                run()
            print(json.dumps({"name": name, **found}))
        continue
    with measured(found):
        model, groups = build(config)
        batch = make_batch(config, model)
        optimizer = build_optimizer(config.train, model, groups)
        model.train()
        for _ in range(2):  # the optimiser's state is there from the second step on
            with torch.autocast("cpu", torch.bfloat16, enabled=config.train.precision == "bf16"):
                loss, metrics = model(batch)
            loss.backward()
            del loss, metrics
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    print(json.dumps({**found, "weights": weights}))
    del model, batch, optimizer
"""

CASES = [
    ("stage1_joint", "train.precision=no", "decoder.gradient_checkpointing=false"),
    ("stage1_joint", "train.precision=bf16", "decoder.gradient_checkpointing=true"),
    ("stage2", "train.precision=no", "mllm.gradient_checkpointing=true"),
    ("stage2", "train.precision=bf16", "mllm.gradient_checkpointing=false"),
    ("stage3", "train.precision=no", "decoder.gradient_checkpointing=true"),
]
FULL_PRECISION = [f"play.{part}precision=no" for part in ("", "decoder_", "autoencoder_")]
PLAY = ("play", "play.device=cpu", *FULL_PRECISION)


@pytest.fixture(scope="module")
def measured(small):
    """Bytes at the peak of two real steps of each case, in a process of its own."""
    trees = [configuration.to_tree(small(*case)) for case in (*CASES, PLAY)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(trees),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: " ".join(CASES[n]))
def test_the_plan_is_what_a_step_takes(small, measured, number):
    """Within 5 %: libraries under torch take scratch memory that no operator returns."""
    planned, found = plan_training(small(*CASES[number])), measured[number]
    assert planned.peak == pytest.approx(found["peak"], rel=0.05)
    assert planned.weights == pytest.approx(found["weights"], rel=0.05)  # buffers are counted
    assert planned.activations > 0.2 * planned.peak, "so that the test says something"


def test_the_plan_of_play_is_what_a_pass_takes(small, measured):
    """Within 5 %, too; of what a pass takes beside the weights."""
    found = {part["name"]: part["peak"] for part in measured[len(CASES) :]}
    planned = {part.name: part.working for part in parts(small(*PLAY))}
    for name in ("MLLM", "decoder"):
        assert planned[name] == pytest.approx(found[name], rel=0.05), name
    # The CPU's 3-D convolution unfolds its input, which no operator returns: half of it here.
    assert 0.4 * found["autoencoder"] < planned["autoencoder"] <= found["autoencoder"]


def test_checkpointing_saves_activations_and_nothing_else(small):
    on, off = (
        plan_training(small("stage2", f"mllm.gradient_checkpointing={value}"))
        for value in ("true", "false")
    )
    assert on.activations < 0.8 * off.activations
    assert (on.weights, on.gradients, on.optimizer) == (off.weights, off.gradients, off.optimizer)


# ---- layouts


def test_layouts_share_what_they_say(small):
    def plan(layout, devices, *more):
        return plan_training(
            small("stage2", f"plan.layout={layout}", f"plan.devices={devices}", *more)
        )

    alone, ddp = plan("ddp", 1), plan("ddp", 4)
    assert ddp.weights == alone.weights and ddp.optimizer == alone.optimizer
    assert alone.communication == 0 and ddp.communication == ddp.gradients
    assert alone.optimizer == pytest.approx(2 * alone.gradients, rel=0.01)  # two moments
    fsdp = plan("fsdp", 4)
    assert fsdp.weights == alone.weights // 4 and fsdp.gradients == alone.gradients // 4
    assert fsdp.optimizer == pytest.approx(alone.optimizer / 4, rel=0.01)
    zero2, zero3 = plan("zero2", 4), plan("zero3", 4)
    assert zero2.weights == alone.weights // 2 and zero3.weights == alone.weights // 8
    assert (
        zero2.optimizer
        == zero3.optimizer
        == pytest.approx((alone.optimizer + alone.gradients) / 4, rel=0.01)
    )  # moments, and float32 copies of what trains
    average = plan("ddp", 4, "train.ema_decay=0.9")
    assert average.average == alone.gradients and average.peak == ddp.peak + average.average
    for found in (alone, ddp, fsdp, zero2, zero3):
        most = sum((found.weights, found.gradients, found.optimizer, found.communication))
        assert found.peak <= most + found.activations


def test_a_device_holds_what_stays_and_whoever_works():
    def part(name, device, kind, weights, streamed, working):
        return Part(name, device, kind, weights, streamed, working)

    a = part("a", "cuda:0", "stays", 10, 10, 1)
    b = part("b", "cuda:0", "turns", 5, 5, 9)
    c = part("c", "cuda:0", "layers", 100, 2, 1)
    d = part("d", "cuda:1", "stays", 7, 7, 3)
    assert peaks([a, b, c, d]) == {"cuda:0": 24, "cuda:1": 10, "host memory, waiting": 105}
    assert peaks([a, c])["cuda:0"] == 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    [("one_8gb", 8), ("one_12gb_nf4", 12), ("one_24gb", 24), ("one_24gb_int8", 24),
     ("two_24gb", 24), ("one_large", 48)],
)  # fmt: skip
def test_a_preset_fits_its_card(preset, gigabytes):
    found = peaks(parts(configuration.load(FULL / "memory" / f"{preset}.yaml")))
    cards = [size for device, size in found.items() if device.startswith("cuda")]
    assert cards and max(cards) < 0.9 * gigabytes * 2**30


@pytest.mark.slow
def test_the_script_prints_them_in_a_minute_and_4_gb():
    """Processor time: on a machine of its own that is what passes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # A child's size begins with its parent's.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6, "so the next line would fail"
    done = subprocess.run(
        [sys.executable, "scripts/plan.py", "--config", "configs/full/stage2.yaml"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "348,622,848" in done.stdout and "7,328,210,944" in done.stdout
    assert "Memory of each of 8 devices in stage2: ddp" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert after.ru_maxrss < 4e6  # kB; the largest child so far


def test_the_report_says_whether_it_fits(small, monkeypatch):
    monkeypatch.setattr("animegamer.plan.counts", lambda config: {"encoder": 5})
    text = report(small("stage3", "plan.device_memory=1"))
    assert "planned, not measured: fits 1 GB by 1.0 GB" in text
    assert "does not fit" in report(small("stage3", "plan.device_memory=0.001"))


# ---- the README's figures

LAYOUTS = {"DDP": "ddp", "FSDP": "fsdp", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}
STAGES = {"warm-up": "stage1_warmup", "joint": "stage1_joint", "stage 2": "stage2"}


def table_rows(header):
    """Cells of the README's table with that first column."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split(f"| {header} |")[1].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[2:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_says_how_large_the_weights_are():
    found = counts(configuration.load(FULL / "stage2.yaml", ["mllm.lora.rank=0"]))
    gigabytes = {name: f"{2 * count / 1e9:.1f}" for name, count in found.items()}
    said = {cells[0].partition(",")[0]: cells[2] for cells in table_rows("weights")}
    both = f"{gigabytes['decoder, without LoRA']}, {gigabytes['video autoencoder']}"
    assert said["CogVideoX-2B: transformer"] == both
    assert said["T5 v1.1 XXL"] == gigabytes["T5 encoder"]
    assert said["Mistral-7B-Instruct-v0.1"] == gigabytes["Mistral"]


@pytest.mark.slow
@pytest.mark.parametrize("cells", table_rows("stage"), ids=lambda cells: " ".join(cells[:2]))
def test_the_readme_says_what_training_is_planned_to_take(cells):
    stage = STAGES.get(cells[0], "stage3")
    config = configuration.load(FULL / f"{stage}.yaml", [f"plan.layout={LAYOUTS[cells[1]]}"])
    plan = plan_training(config)
    found = (plan.weights, plan.gradients, plan.optimizer, plan.activations, plan.peak)
    assert [f"{number / 1e9:.1f}" for number in found] == cells[2:]


@pytest.mark.slow
@pytest.mark.parametrize("cells", table_rows("preset"), ids=lambda cells: cells[0])
def test_the_readme_says_what_play_is_planned_to_take(cells):
    config = configuration.load(FULL / "memory" / f"{cells[0].strip('`')}.yaml", [])
    found = {place: number / 1e9 for place, number in peaks(parts(config)).items()}
    cards = [f"{number:.1f}" for place, number in found.items() if place.startswith("cuda")]
    host = sum(number for place, number in found.items() if not place.startswith("cuda"))
    assert " and ".join(cards) == cells[1]
    assert (f"{host:.1f}" if host else "-") == cells[2]
