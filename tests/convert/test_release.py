"""A whole release: converted, played, loaded by other libraries, converted back."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import inference_Decoder
import inference_MLLM
from animegamer import config as configuration
from animegamer.checkpoint import CheckpointError
from animegamer.config import LoraConfig
from animegamer.convert.release import ReleaseFiles, from_release, to_release
from animegamer.convert.stock import to_stock
from animegamer.game import MotionScope
from animegamer.models.decoder_files import load_decoder, save_decoder
from animegamer.models.mllm import NextStateMLLM
from animegamer.saved_game import SavedGame
from animegamer.video import read_video
from scripts import convert_weights
from tests.release_checkpoint import (
    ENGINE,
    FILES,
    POSITIONS,
    SMALL_DECODER,
    decoder_shapes,
    make_release,
    positions,
    random_weights,
)
from tests.tiny_checkpoint import make_checkpoint, tiny_config

STORY = """Opening: first.png

Character: Nilo; Motion: quickly run; Background: day town.
Character: Mavi and Juno; Motion: gently talk; Background: night forest.
Character: Juno; Motion: run; Background: day forest.
"""


def release_files(directory, *parts):
    return ReleaseFiles(**{part: directory / FILES[part] for part in parts or FILES})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Small T5, CLIP and Mistral, a release whose sizes fit them, and a configuration."""
    folder = tmp_path_factory.mktemp("release")
    make_checkpoint(folder / "tiny")
    make_release(folder / "release", folder / "tiny" / "backbones" / "language_base")
    (folder / "story.txt").write_text(STORY, encoding="utf-8")
    Image.new("RGB", (90, 40), "teal").save(folder / "first.png")
    config = tiny_config(folder / "tiny", folder / "out", scripts=(str(folder / "story.txt"),))
    decoder = replace(config.decoder, lora=LoraConfig(3, 1.5))
    config = replace(
        config, decoder=decoder, mllm=replace(config.mllm, lora=LoraConfig(5, 5.0, 0.05))
    )
    configuration.save(config, folder / "full.yaml")
    return folder


@pytest.fixture(scope="module")
def config(place):
    return configuration.load(place / "full.yaml")


@pytest.fixture(scope="module")
def kept(place, config):
    from_release(release_files(place / "release"), place / "kept", config)
    return place / "kept"


@pytest.fixture(scope="module")
def merged(place, config):
    report = from_release(release_files(place / "release"), place / "merged", config, merge=True)
    assert "cannot be converted back" in report
    return place / "merged"


def weights(path, container):
    content = torch.load(path, weights_only=True)
    return content[container] if container else content


CONTAINERS = {"mllm": None, "decoder": "module", "autoencoder": "state_dict"}


def assert_same_files(first, second, *parts):
    for part in parts or FILES:
        a, b = (weights(d / FILES[part], CONTAINERS[part]) for d in (first, second))
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


# ---- there and back


def test_a_release_goes_there_and_back(place, kept):
    report = to_release(kept, place / "back")
    assert_same_files(place / "release", place / "back")
    content = torch.load(place / "back" / FILES["decoder"], weights_only=True)
    assert content["iteration"] == 7000
    assert [line.split() for line in report.splitlines()[1:]] == [
        [FILES[part], str(len(weights(place / "release" / FILES[part], CONTAINERS[part])))]
        for part in FILES
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_as_it_is(place, config, tmp_path, dtype):
    make_release(tmp_path / "release", Path(config.backbones.language_base), dtype)
    from_release(release_files(tmp_path / "release"), tmp_path / "ours", config)
    stored = load_file(tmp_path / "ours/backbones/language_base/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    to_release(tmp_path / "ours", tmp_path / "back")
    assert_same_files(tmp_path / "release", tmp_path / "back")


def test_a_release_without_lora_goes_there_and_back(config, tmp_path):
    """SAT can merge its LoRA as well."""
    made = random_weights(decoder_shapes(SMALL_DECODER, lora=False), 4)
    made[POSITIONS] = positions(SMALL_DECODER)
    torch.save({"module": made}, tmp_path / FILES["decoder"])
    from_release(release_files(tmp_path, "decoder"), tmp_path / "ours", config)
    assert not (tmp_path / "ours" / "backbones").exists()
    assert load_decoder(tmp_path / "ours" / "decoder").config.num_layers == 3
    assert configuration.load(tmp_path / "ours" / "config.yaml").decoder.lora.rank == 0
    to_release(tmp_path / "ours", tmp_path / "back")
    assert_same_files(tmp_path, tmp_path / "back", "decoder")


def test_an_autoencoder_of_a_training_checkpoint_keeps_its_prefix(place, config, tmp_path):
    inside = weights(place / "release" / FILES["autoencoder"], "state_dict")
    renamed = {f"first_stage_model.{key}": tensor for key, tensor in inside.items()}
    torch.save({"state_dict": renamed}, tmp_path / FILES["autoencoder"])
    from_release(release_files(tmp_path, "autoencoder"), tmp_path / "ours", config)
    to_release(tmp_path / "ours", tmp_path / "back")
    assert_same_files(tmp_path, tmp_path / "back", "autoencoder")


def test_a_decoder_that_trained_on_goes_back_as_it_is(place, kept, tmp_path):
    shutil.copytree(kept, tmp_path / "ours")
    decoder = load_decoder(tmp_path / "ours" / "decoder")
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(".lora_" in name or ".norm1.linear" in name)
            parameter.add_(float(parameter.requires_grad))
    save_decoder(decoder, tmp_path / "ours" / "decoder")
    to_release(tmp_path / "ours", tmp_path / "back")
    before, after = (
        weights(folder / FILES["decoder"], "module")
        for folder in (place / "release", tmp_path / "back")
    )
    for key, tensor in after.items():
        change = tensor - before[key]
        if "adaLN_modulations" in key:  # of 12 parts, those of the norm before attention
            change = torch.stack([part.mean() for part in change.chunk(12)])
            expected = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0])
            torch.testing.assert_close(change, expected, atol=1e-5, rtol=0)
        else:
            assert change.abs().max() < 1e-5 or (".matrix_" in key and change.min() > 0.999), key


def test_extras_are_what_nobody_uses(kept):
    extras = load_file(kept / "release_extras.safetensors")
    assert sorted(extras) == [
        "autoencoder/loss.discriminator.weight",
        "decoder/conditioner.embedders.0.transformer.shared.weight",
        f"decoder/{ENGINE}mixins.patch_embed.output_mix_layer_norm.bias",
        f"decoder/{ENGINE}mixins.patch_embed.output_mix_layer_norm.weight",
        f"decoder/{POSITIONS}",
    ]


def test_a_merged_checkpoint_does_not_go_back(merged, tmp_path):
    with pytest.raises(CheckpointError, match="LoRA is merged: .* cannot be converted back"):
        to_release(merged, tmp_path / "back")
    assert not (merged / "release_extras.safetensors").exists()
    assert not (tmp_path / "back").exists()


# ---- what it becomes


def inputs(decoder):
    torch.manual_seed(0)
    sizes = SMALL_DECODER
    count = len(MotionScope.SCALARS)
    z = torch.randn(count, sizes.frames, sizes.channels, sizes.rows, sizes.columns)
    t = torch.linspace(1, 999, count).long()
    return z, t, torch.randn(count, sizes.tokens, sizes.width), torch.tensor(MotionScope.SCALARS)


@torch.no_grad()
def test_merging_changes_nothing_but_the_layout(kept, merged):
    first, second = (load_decoder(where / "decoder").eval() for where in (kept, merged))
    z, t, s_a, f_ms = inputs(first)
    v = first.predict(z, t, s_a, f_ms)
    torch.testing.assert_close(second.predict(z, t, s_a, f_ms), v, atol=1e-5, rtol=1e-5)
    bare = CogVideoXTransformer3DModel.from_pretrained(kept / "backbones" / "video_base")
    assert (bare(z, s_a, t, return_dict=False)[0] - v).abs().max() > 0.01  # the LoRA matters
    ids = torch.arange(40)[None]
    logits = [
        NextStateMLLM.from_pretrained(where / "mllm").mistral(ids).logits
        for where in (kept, merged)
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_the_configuration_has_the_files_sizes(kept):
    config = configuration.load(kept / "config.yaml")
    assert (config.shot.frames, config.shot.height, config.shot.width) == (9, 16, 24)
    assert config.decoder.lora == LoraConfig(3, 1.5) and config.decoder.motion_scope_hidden == 12
    assert config.mllm.projection_hidden == 40
    assert config.backbones.autoencoder == (kept / "backbones/autoencoder").as_posix()


@pytest.mark.parametrize("layout", ["kept", "merged"])
def test_a_three_turn_game_is_played(place, layout, request):
    """States and videos, with an opening that goes through T5, CLIP and the encoder."""
    checkpoint, output = request.getfixturevalue(layout), place / f"game_{layout}"
    settings = [
        "--config",
        str(place / "full.yaml"),
        f"play.checkpoint={checkpoint}",
        f"play.output={output}",
    ]
    assert inference_MLLM.main(settings) == 0
    assert inference_Decoder.main(settings) == 0
    game = SavedGame.read(output)
    assert len(game.turns) == 3
    for turn in (1, 2, 3):
        assert read_video(output / f"turn_{turn:02d}.mp4").shape == (9, 64, 96, 3)
    if layout == "merged" and (place / "game_kept" / "s_a_hat.safetensors").is_file():
        one, other = (load_file(place / f"game_{x}/s_a_hat.safetensors") for x in ("kept", layout))
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


# ---- without our code


@torch.no_grad()
@pytest.mark.parametrize("layout", ["kept", "merged"])
def test_stock_libraries_load_what_to_stock_writes(layout, request, tmp_path):
    checkpoint = request.getfixturevalue(layout)
    report = to_stock(checkpoint, tmp_path / "stock")
    assert "transformer/" in report and "language_model/" in report
    stock, loading = CogVideoXTransformer3DModel.from_pretrained(
        tmp_path / "stock" / "transformer", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ours = load_decoder(checkpoint / "decoder").eval()
    z, t, s_a, f_ms = inputs(ours)
    v = stock(z, s_a, t, ofs=f_ms, return_dict=False)[0]
    torch.testing.assert_close(v, ours.predict(z, t, s_a, f_ms), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(
        stock(z, s_a, t, ofs=f_ms.flip(0), return_dict=False)[0], v, atol=0.01
    )

    llm, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stock" / "language_model", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids, mllm = torch.arange(40)[None], NextStateMLLM.from_pretrained(checkpoint / "mllm")
    logits = mllm.mistral(ids).logits
    torch.testing.assert_close(llm(ids).logits, logits, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stock" / "language_model")
    assert len(tokenizer) == llm.config.vocab_size
    with pytest.raises(CheckpointError, match="is there already"):
        to_stock(checkpoint, tmp_path / "stock")


@torch.no_grad()
def test_peft_loads_the_adapters_on_stock_bases(kept, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(kept / "backbones" / "language_base")
    wrapped = PeftModel.from_pretrained(base, kept / "mllm" / "adapter")
    ids, ours = torch.arange(40)[None], NextStateMLLM.from_pretrained(kept / "mllm")
    torch.testing.assert_close(wrapped(ids).logits, ours.mistral(ids).logits)

    base = CogVideoXTransformer3DModel.from_pretrained(kept / "backbones" / "video_base")
    wrapped = PeftModel.from_pretrained(base, kept / "decoder" / "adapter")
    ours = load_decoder(kept / "decoder").eval()
    ours.ofs_embedding.linear_2.weight.zero_()  # a stock base has no motion scope
    ours.ofs_embedding.linear_2.bias.zero_()
    z, t, s_a, f_ms = inputs(ours)
    v = wrapped(hidden_states=z, encoder_hidden_states=s_a, timestep=t, return_dict=False)[0]
    torch.testing.assert_close(v, ours.predict(z, t, s_a, f_ms), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_diffusers_loads_the_autoencoder(kept):
    model, loading = AutoencoderKLCogVideoX.from_pretrained(
        kept / "backbones" / "autoencoder", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.decode(torch.randn(1, 4, 3, 2, 3)).sample.shape == (1, 3, 9, 16, 24)


def test_a_checkpoint_of_our_own_is_written_for_stock_libraries(place, tmp_path):
    """Its motion-scope MLP fits, it never was the authors'."""
    report = to_stock(place / "tiny", tmp_path / "stock")
    assert report.count("parameters") == 2
    stock = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "stock" / "transformer")
    assert stock.config.ofs_embed_dim == 8


# ---- what is refused


def test_the_lora_must_be_the_one_that_is_meant(place, config, tmp_path):
    files = release_files(place / "release")
    for part in ("decoder", "mllm"):
        section = replace(getattr(config, part), lora=LoraConfig(64, 1.0))
        with pytest.raises(CheckpointError, match=rf"rank \d, .* says {part}.lora.rank 64 .* set"):
            from_release(files, tmp_path / "ours", replace(config, **{part: section}))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("part", "setting", "message"),
    [
        ("decoder", {"text_tokens": 30}, "s_a has 10 tokens .* backbones.text_tokens is 30"),
        ("mllm", {"text_tokens": 30}, r"embed_tokens.weight has \d+ rows, but .* \d+ tokens"),
        ("mllm", {"language_base": "none"}, "no none/config.json"),
    ],
)
def test_the_configuration_must_fit(place, config, tmp_path, part, setting, message):
    changed = replace(config, backbones=replace(config.backbones, **setting))
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        from_release(release_files(place / "release", part), tmp_path / "ours", changed)
    assert not list(tmp_path.iterdir())


def test_files_of_two_releases_are_refused(place, config, tmp_path):
    files = release_files(place / "release")
    other = replace(SMALL_DECODER, heads=4)
    for name, sizes, message in (
        ("wide", other, "predicts s_a of width 48, .* takes 96"),
        ("deep", replace(SMALL_DECODER, channels=5), "latents of 5 channels, .* of 4"),
    ):
        made = random_weights(decoder_shapes(sizes), 5) | {POSITIONS: positions(sizes)}
        torch.save(made, tmp_path / f"{name}.pt")
        with pytest.raises(CheckpointError, match=message):
            from_release(replace(files, decoder=tmp_path / f"{name}.pt"), tmp_path / "o", config)


def test_nothing_is_overwritten(place, config, kept):
    with pytest.raises(CheckpointError, match="kept is there already"):
        from_release(release_files(place / "release"), kept, config)
    with pytest.raises(CheckpointError, match="release is there already"):
        to_release(kept, place / "release")
    with pytest.raises(CheckpointError, match="no file of the release is named"):
        from_release(ReleaseFiles(), place / "new", config)
    with pytest.raises(CheckpointError, match="neither decoder/ nor mllm/"):
        to_stock(place / "release", place / "new")


def test_only_a_whole_converted_checkpoint_goes_back(place, kept, tmp_path):
    with pytest.raises(CheckpointError, match="only a checkpoint that was converted from"):
        to_release(place / "tiny", tmp_path / "back")
    ours = tmp_path / "ours"
    shutil.copytree(kept, ours)
    adapter = ours / "decoder" / "adapter" / "adapter_model.safetensors"
    stored = load_file(adapter)
    stored.popitem()
    save_file(stored, adapter)
    with pytest.raises(CheckpointError, match="decoder gives 107 keys .* expected 112 together"):
        to_release(ours, tmp_path / "back")
    adapter.unlink()
    with pytest.raises(CheckpointError, match="adapter_model.safetensors cannot be read"):
        to_release(ours, tmp_path / "back")
    (ours / "release.json").write_text('{"format": 2, "merged": false, "files": {}}')
    with pytest.raises(CheckpointError, match=r"release.json: damaged \(format 2, expected 1\)"):
        to_release(ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


# ---- the script


def test_the_script_converts_in_all_directions(place, tmp_path, capsys):
    given = [f"--{part}={place / 'release' / name}" for part, name in FILES.items()]
    start = ["from-release", "--config", str(place / "full.yaml"), *given]
    assert convert_weights.main([*start, "--output", str(tmp_path / "ours")]) == 0
    out = capsys.readouterr().out
    counts = {line.split()[0]: line.split()[1:4] for line in out.splitlines() if ".pt" in line}
    assert counts["mp_rank_00_model_states.pt"] == ["112", "108", "4"]
    assert "2 unused: not used by the authors' network either" in out
    assert "LoRA rank 3; alpha 1.5 by the configuration" in out
    for direction in ("to-release", "to-stock"):
        ways = ["--checkpoint", str(tmp_path / "ours"), "--output", str(tmp_path / direction)]
        assert convert_weights.main([direction, *ways]) == 0
    assert_same_files(place / "release", tmp_path / "to-release")
    again = json.loads((tmp_path / "ours" / "release.json").read_text())
    assert list(again["files"]) == list(FILES)


def test_the_script_says_what_is_wrong_in_one_line(place, tmp_path, capsys):
    file = str(place / "release" / FILES["mllm"])
    common = ["from-release", "--output", str(tmp_path / "x"), "--config", str(place / "full.yaml")]
    for more, words in (
        (["--decoder", file], "convert_weights.py: .*pytorch_model.bin: key .* others are unknown"),
        (["--mllm", "none.bin"], "no file none.bin"),
        (["--mllm", file, "mllm.lora.rank=4"], "set mllm.lora.rank=5"),
        (["--mllm", file, "mllm.rank=4"], "mllm.rank"),
    ):
        assert convert_weights.main([*common, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and re.search(words, error), error
    assert convert_weights.main(["to-stock", "--output", str(tmp_path / "x")]) == 2
    assert "needs --checkpoint" in capsys.readouterr().err
