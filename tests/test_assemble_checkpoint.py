"""From training runs to the public checkpoint: complete, playable, float16, whole or not at all."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from animegamer import config as configuration
from animegamer.checkpoint import fingerprint
from animegamer.config import AssembleConfig
from animegamer.game import Instruction
from animegamer.session import GameSession
from animegamer.vocabulary import Vocabulary
from data_pipeline.builtin_world.vocabulary import vocabulary
from data_pipeline.features import feature_source
from tests.tiny_checkpoint import make_checkpoint, tiny_config

ROOT = Path(__file__).parents[1]


def script():
    path = ROOT / "scripts/assemble_checkpoint.py"
    spec = importlib.util.spec_from_file_location("assemble_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The networks that the runs below hold; the backbones float16, as they are trained to be."""
    networks = make_checkpoint(tmp_path_factory.mktemp("made") / "networks")
    for file in (networks / "backbones").rglob("*.safetensors"):
        half = {name: tensor.half() for name, tensor in load_file(file).items()}
        save_file(half, file, metadata={"format": "pt"})
    return networks


@pytest.fixture
def place(tmp_path, made):
    """Three runs as training leaves them, an assemble.yaml, and an older checkpoint."""
    config = tiny_config(made, tmp_path / "unused")
    eyes = feature_source(config.backbones)
    export(made, tmp_path / "stage1", ["encoder", "decoder"], eyes)
    trained_on = {**eyes, "init": fingerprint(tmp_path / "stage1/step_0000007/export/encoder")}
    export(made, tmp_path / "stage2", ["mllm"], trained_on)
    trained_on = {**eyes, "mllm": fingerprint(tmp_path / "stage2/step_0000007/export/mllm")}
    export(made, tmp_path / "stage3", ["decoder"], trained_on)
    runs = {"encoder": "stage1", "decoder": "stage3", "mllm": "stage2", "output": "public"}
    assemble = AssembleConfig(
        **{part: str(tmp_path / run) for part, run in runs.items()},
        backbones=("autoencoder", "image_encoder", "text_encoder", "language_base"),
        vocabulary=True,
    )
    configuration.save(replace(config, assemble=assemble), tmp_path / "assemble.yaml")
    (tmp_path / "public/encoder").mkdir(parents=True)
    (tmp_path / "public/encoder/old.json").write_text("{}")
    (tmp_path / "public/README.md").write_text("what it is")
    return tmp_path


def export(made, run, parts, parents):
    step = run / "step_0000007"
    for part in parts:
        shutil.copytree(made / part, step / "export" / part)
        file = step / "export" / part / "config.json"
        if file.is_file():
            settings = json.loads(file.read_text())
            file.write_text(json.dumps({**settings, "_name_or_path": "/home/someone/runs"}))
    (step / "state.json").write_text(
        json.dumps({"step": 7, "parents": parents, "finished": run.name != "stage3"})
    )


def assemble(place, *overrides):
    return script().main(["--config", str(place / "assemble.yaml"), *overrides])


def test_the_checkpoint_is_complete_and_plays(place, capsys):
    assert assemble(place) == 0
    printed = capsys.readouterr().out
    assert "stage3, step 7, unfinished" in printed and "total" in printed
    public = place / "public"
    for name in ("autoencoder", "image_encoder", "text_encoder", "language_base"):
        assert (public / "backbones" / name).is_dir()
    assert not (public / "encoder/old.json").exists()
    assert (public / "README.md").read_text() == "what it is", "what else is there stays"
    assert not list(place.glob(".public*"))
    shutil.rmtree(place / "stage1")
    config = tiny_config(public, place / "out")
    session = GameSession.load(config)
    states = [session.step(Instruction(("尼洛",), "run", "day town")) for _ in range(2)]
    assert states[1].shot.shape == (5, 16, 24, 3)
    assert list(session.meters.values) == ["尼洛"]
    assert session.vocabulary.character("尼洛") == "Nilo"


def test_everything_is_float16_and_says_nothing_of_the_machine(place, made):
    assert assemble(place) == 0
    public = place / "public"
    for part in ("encoder", "decoder", "mllm"):
        for file in (public / part).rglob("*.safetensors"):
            kinds = {tensor.dtype for tensor in load_file(file).values()}
            assert kinds == {torch.float16}, file
    for file in public.rglob("*.json"):
        assert "/home/someone" not in file.read_text(encoding="utf-8"), file
    null = load_file(public / "decoder/null.safetensors")["s_a_null"]
    trained = load_file(made / "decoder/null.safetensors")["s_a_null"]
    torch.testing.assert_close(null.float(), trained, atol=2e-3, rtol=2e-3)
    assert json.loads((public / "mllm/mllm.json").read_text())["base"] == (
        "../backbones/language_base"
    )


def test_its_configuration_is_the_model_part(place):
    assert assemble(place) == 0
    tree = yaml.safe_load((place / "public/config.yaml").read_text(encoding="utf-8"))
    assert tuple(tree) == configuration.MODEL_SECTIONS
    assert tree["backbones"]["autoencoder"] == f"{place}/public/backbones/autoencoder"
    assert configuration.load(place / "public/config.yaml").shot.frames == 5


def test_a_decoder_of_stage_1_and_plain_checkpoints_will_do(place, capsys):
    assert assemble(place, f"assemble.decoder={place}/stage1") == 0
    again = [f"assemble.{p}={place}/public" for p in ("encoder", "decoder", "mllm")]
    assert assemble(place, *again, f"assemble.output={place}/second") == 0
    assert (place / "second/mllm/mllm.json").is_file()
    assert (place / "second/vocabulary.json").is_file()
    third = [f"assemble.output={place}/third", "assemble.vocabulary=false"]
    assert assemble(place, *again, *third) == 0
    assert not (place / "third/vocabulary.json").exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("run", "parent", "message"),
    [
        ("stage2", "init", "this mllm was trained on another encoder"),
        ("stage3", "mllm", "this decoder was trained on another mllm"),
        ("stage1", "autoencoder", "this encoder was trained on another autoencoder"),
    ],
)
def test_parts_that_do_not_belong_together(place, capsys, run, parent, message):
    file = place / run / "step_0000007/state.json"
    state = json.loads(file.read_text())
    state["parents"][parent] = "0123456789abcdef"
    file.write_text(json.dumps(state))
    assert assemble(place) == 2
    assert message in capsys.readouterr().err
    nothing_changed(place)


@pytest.mark.parametrize("limit", ["largest", "largest_file"])
def test_too_large_is_refused(place, capsys, limit):
    assert assemble(place, f"assemble.{limit}=20000") == 2
    error = capsys.readouterr().err
    assert "larger than 0.02 MB" in error and "decoder" in error
    nothing_changed(place)


def test_full_precision_backbones_are_refused(place, made, capsys):
    shutil.copytree(made / "backbones/text_encoder", place / "text_encoder")
    file = place / "text_encoder/model.safetensors"
    full = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(full, file, metadata={"format": "pt"})
    for state_file in place.rglob("state.json"):
        state = json.loads(state_file.read_text())
        state["parents"]["text_encoder"] = fingerprint(place / "text_encoder")
        state_file.write_text(json.dumps(state))
    assert assemble(place, f"backbones.text_encoder={place}/text_encoder") == 2
    assert "text_encoder/model.safetensors holds F32, expected F16" in capsys.readouterr().err
    nothing_changed(place)


def test_a_run_without_weights(place, capsys):
    assert assemble(place, f"assemble.mllm={place}/none") == 2
    assert f"no weights in {place}/none" in capsys.readouterr().err
    nothing_changed(place)


def nothing_changed(place):
    assert [file.name for file in sorted((place / "public").rglob("*"))] == [
        "README.md",
        "encoder",
        "old.json",
    ]
    assert not list(place.glob(".public*"))


def test_the_worlds_names_are_a_vocabulary(tmp_path):
    file = tmp_path / "vocabulary.json"
    file.write_text(json.dumps(vocabulary(), ensure_ascii=False), encoding="utf-8")
    names = Vocabulary.read(file)
    assert set(names.characters) == {"Nilo", "Mavi", "Juno", "Orin", "Pela", "Bruk"}
    assert names.place("夜晚的小镇") == names.place("town street at dusk") == "town"
    assert names.place("day snow field") == "snow field"
    assert names.romanised("そっと踊る") == "gently dance"
    assert names.romanised("一起跳舞") == "dance"
    assert names.unknown([Instruction(("Mavi", "Zed"), "run", "moon")]) == ["Zed", "moon"]
