"""The loader: bases, overrides, strict types, clear errors; every shipped YAML loads."""

import dataclasses
import re
from pathlib import Path

import pytest

from animegamer import config
from animegamer.config import Config, ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "accelerate"
)


def test_defaults_are_the_papers():
    loaded = config.load()
    assert loaded == Config()
    assert (loaded.shot.frames, loaded.shot.fps) == (17, 8)
    assert loaded.backbones.text_tokens + loaded.backbones.visual_tokens == 226
    assert loaded.decoder.lora.rank == 64
    assert (loaded.mllm.lora.rank, loaded.mllm.lora.alpha) == (32, 32.0)


def test_order_defaults_bases_file_overrides(write):
    write("base.yaml", "train: {lr: 1.0e-3, steps: 7, batch_size: 3}\nshot: {width: 96}")
    path = write("run.yaml", "_base_: base.yaml\ntrain: {steps: 8, seed: 4}")
    loaded = config.load(path, ["train.seed=5"])
    assert loaded.train.lr == 1e-3
    assert (loaded.train.steps, loaded.train.batch_size, loaded.train.seed) == (8, 3, 5)
    assert (loaded.shot.width, loaded.shot.height) == (96, 480)


def test_several_bases_and_bases_of_bases(write):
    write("sizes.yaml", "shot: {width: 96}")
    write("deep/model.yaml", "_base_: ../sizes.yaml\nmllm: {lora: {rank: 4}}")
    write("data.yaml", "data: {workers: 0}")
    path = write("run.yaml", "_base_: [deep/model.yaml, data.yaml]")
    loaded = config.load(path)
    assert (loaded.shot.width, loaded.mllm.lora.rank, loaded.data.workers) == (96, 4, 0)
    assert loaded.mllm.lora.alpha == 1.0  # LoraConfig's own default: mappings build anew


def test_lists_replace(write):
    write("base.yaml", "train: {trainable: [encoder, decoder.lora]}")
    path = write("run.yaml", "_base_: base.yaml\ntrain: {trainable: [mllm]}")
    assert config.load(path).train.trainable == ("mllm",)
    assert config.load(path, ["train.trainable=[a, b]"]).train.trainable == ("a", "b")


def test_two_bases_that_set_one_leaf(write):
    write("a.yaml", "train: {lr: 1.0}")
    write("b.yaml", "train: {lr: 2.0, seed: 1}")
    path = write("run.yaml", "_base_: [a.yaml, b.yaml]")
    with pytest.raises(ConfigError, match=r"run\.yaml: two bases set 'train\.lr'"):
        config.load(path)


def test_cycle(write):
    write("a.yaml", "_base_: b.yaml")
    path = write("b.yaml", "_base_: a.yaml")
    with pytest.raises(ConfigError, match=r"cycle: .*b\.yaml -> .*a\.yaml -> .*b\.yaml"):
        config.load(path)


@pytest.mark.parametrize("bases", ["5", "null", "[a.yaml, 5]", "{a: b}"])
def test_base_that_is_no_path(write, bases):
    with pytest.raises(ConfigError, match=r"run\.yaml: _base_ is .*expected a path or a list"):
        config.load(write("run.yaml", f"_base_: {bases}"))


def test_missing_files_are_named(write, tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere\.yaml"):
        config.load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"no configuration file .*gone\.yaml"):
        config.load(write("run.yaml", "_base_: gone.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lerning_rate: 1}", "unknown key train.lerning_rate"),
        ("train: {step: 1}", "unknown key train.step; did you mean train.steps?"),
        ("trian: {steps: 1}", "unknown key trian; did you mean train?"),
        ("mllm: {lora: {rnak: 1}}", "unknown key mllm.lora.rnak; did you mean mllm.lora.rank?"),
        ("1: 2", "unknown key 1; known: shot, backbones"),
        ("train: {_base_: x}", "unknown key train._base_"),
    ],
)
def test_unknown_key_names_the_nearest(write, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.load(write("run.yaml", text))


def test_error_names_the_file_at_fault(write):
    write("base.yaml", "train: {step: 1}")
    with pytest.raises(ConfigError, match=r"base\.yaml: unknown key train\.step;"):
        config.load(write("run.yaml", "_base_: base.yaml"))
    with pytest.raises(ConfigError, match=r"override 'train\.step=1': unknown key"):
        config.load(write("fine.yaml", "train: {steps: 1}"), ["train.step=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1.5}", "train.steps is 1.5, expected an integer"),
        ("train: {steps: 1e3}", "train.steps is '1e3', expected an integer"),
        ("train: {steps: true}", "train.steps is True, expected an integer"),
        ("train: {steps: null}", "train.steps is None, expected an integer"),
        ("train: {lr: true}", "train.lr is True, expected a number"),
        ("train: {lr: fast}", "train.lr is 'fast', expected a number"),
        ("train: {lr: .nan}", "train.lr is nan, expected a number"),
        ("train: {run: 5}", "train.run is 5, expected a string"),
        ("train: {trainable: encoder}", "train.trainable is 'encoder', expected a list"),
        ("train: {trainable: [1]}", "train.trainable[0] is 1, expected a string"),
        ("train: {lr_groups: {a: b}}", "train.lr_groups.a is 'b', expected a number"),
        ("train: {precision: fp8}", "train.precision is 'fp8', expected 'no' or 'fp16' or"),
        ("train: {precision: on}", "train.precision is True, expected 'no' or"),
        ("decoder: {motion_scope: 1}", "decoder.motion_scope is 1, expected true or false"),
        ("encoder: {visual_positions: 'yes'}", "expected true or false"),
        ("train: 5", "train is 5, expected a mapping"),
        ("train:", "train is None, expected a mapping"),
        ("[1, 2]", "expected a mapping, found list"),
        ("train: {steps: 1", "run.yaml"),
        ("train: {steps: 1}\nplay: {seed: 1}\ntrain: {seed: 1}", "'train' again"),
        ("train: {steps: 1, steps: 1}", "'steps' again"),
    ],
)
def test_strict_types(write, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.load(write("run.yaml", text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {lr: 1e-4}", 1e-4),  # to PyYAML a string
        ("train: {lr: 1.0e-4}", 1e-4),
        ("train: {lr: 1}", 1.0),
    ],
)
def test_numbers(write, text, expected):
    lr = config.load(write("run.yaml", text)).train.lr
    assert lr == expected and type(lr) is float


def test_no_is_a_precision_and_not_false(write):
    assert config.load(write("run.yaml", "train: {precision: no}")).train.precision == "no"
    assert config.load(overrides=["train.precision=no"]).train.precision == "no"
    assert config.load(write("off.yaml", "decoder: {motion_scope: off}")).decoder == (
        dataclasses.replace(Config().decoder, motion_scope=False)
    )


def test_optional_values(write):
    assert config.load(write("run.yaml", "train: {init: null}")).train.init is None
    assert config.load(overrides=["mllm.projection_hidden=64"]).mllm.projection_hidden == 64
    with pytest.raises(ConfigError, match="expected an integer"):
        config.load(overrides=["mllm.projection_hidden=wide"])


def test_overrides():
    loaded = config.load(
        overrides=["train.lr=3e-4", "--play.sink=1", "mllm.lora.rank=2", "mllm.lora.alpha=2"]
    )
    assert (loaded.train.lr, loaded.play.sink) == (3e-4, 1)
    assert (loaded.mllm.lora.rank, loaded.mllm.lora.alpha) == (2, 2.0)
    assert config.load(overrides=["train.seed=1", "train.seed=2"]).train.seed == 2
    assert config.load(overrides=["play.output=a=b"]).play.output == "a=b"


@pytest.mark.parametrize(
    "override", ["train.lr", "=3", "--=3", "train.lr=[1", "train=3", "train.lr.deep=1", "lr=1"]
)
def test_override_that_cannot_be_read(override):
    with pytest.raises(ConfigError, match=re.escape(f"override {override!r}")):
        config.load(overrides=[override])


@pytest.mark.parametrize(
    "override",
    [
        "shot.frames=18",
        "data.max_turns=0",
        "train.steps=0",
        "train.text_dropout=1.5",
        "train.ema_decay=1",
        "play.window=0",
        "play.sink=2",
        "sampling.steps=2000",
    ],
)
def test_contradictions_name_the_key(override):
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        config.load(overrides=[override])


def test_save_and_load_again(tmp_path):
    loaded = config.load(
        overrides=[
            "train.lr=1.3e-7",
            "train.lr_groups={decoder.lora: 1e-5}",
            "train.trainable=[encoder]",
            "play.opening=图/ひ.png",
            "play.meters.start=30",
        ]
    )
    config.save(loaded, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == loaded
    assert config.from_tree(config.to_tree(loaded)) == loaded


def test_differences():
    old = config.to_tree(config.load())
    new = config.to_tree(config.load(overrides=["train.lr=1", "play.meters.start=10"]))
    assert config.differences(old, new) == [
        "train.lr: 0.0002 -> 1.0",
        "play.meters.start: 50 -> 10",
    ]
    assert config.differences(old, old) == []


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load().train.lr = 1.0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_yaml_loads(path):
    config.load(path)
    text = path.read_text(encoding="utf-8")
    assert "animegamer." not in text, "no class names in YAML"
    assert "${" not in text, "no environment variables in YAML"
