"""The key tables: complete at full size, and strict about everything that does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from animegamer.checkpoint import CheckpointError
from animegamer.convert import autoencoder, decoder, mllm
from animegamer.convert.table import KeyTable, Row, convert, restore
from animegamer.convert.tensors import LazyTensor, TorchFile
from tests.data.parity.parity_load import load
from tests.release_checkpoint import (
    ENGINE,
    POSITIONS,
    SMALL_DECODER,
    AutoencoderSizes,
    DecoderSizes,
    MllmSizes,
    autoencoder_shapes,
    decoder_shapes,
    mllm_shapes,
    positions,
)

SMALL_MLLM = MllmSizes(
    layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2, vocabulary=50, width=12, inner=20,
    rank=3,
)  # fmt: skip


def meta_file(shapes, **values):
    """A file of these shapes without memory, but for some tensors that have to be read."""
    with torch.device("meta"):
        made = {name: LazyTensor.of(torch.empty(shape)) for name, shape in shapes.items()}
    made |= {name: LazyTensor.of(value) for name, value in values.items()}
    return TorchFile(Path("file.pt"), None, made, {}, ())


def decoder_file(sizes=SMALL_DECODER, **options):
    return meta_file(decoder_shapes(sizes, **options), **{POSITIONS: positions(sizes)})


def mistral(directory, sizes):
    settings = {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def count(tensors: Mapping[str, LazyTensor], part: str = "") -> int:
    return sum(tensor.numel for name, tensor in tensors.items() if part in name)


# ---- complete


def fixture_shapes(name, prefix=""):
    return {
        key.removeprefix("sd.").removeprefix(prefix): tuple(tensor.shape)
        for key, tensor in load(name)[0].items()
        if key.startswith("sd.")
    }


def test_the_names_of_these_tests_are_the_releases():
    """Every name and shape of the recorded state dicts, and no other."""
    sizes = DecoderSizes(2, 4, 32, 64, 64, 48, 768, 16, 2, 4, 226, 5, 4, 6)
    assert decoder_shapes(sizes) == fixture_shapes("dit")
    assert torch.equal(positions(sizes), load("dit")[0]["sd." + POSITIONS])
    assert mllm_shapes(MllmSizes(2, 64, 128, 4, 2, 32284, 1920, 64, 4)) == fixture_shapes("mllm")
    vae = autoencoder_shapes(AutoencoderSizes((32, 64, 64, 128), 1, 16))
    assert vae == fixture_shapes("vae", "first_stage_model.")


def test_the_table_covers_a_released_decoder_at_full_size():
    file = decoder_file(DecoderSizes())
    frozen = {
        f"first_stage_model.{k}": v for k, v in autoencoder_shapes(AutoencoderSizes()).items()
    }
    frozen |= {
        "clip_img_encoder.model.visual.conv1.weight": (768, 3, 16, 16),
        "conditioner.embedders.0.transformer.shared.weight": (32128, 4096),
    }
    file.tensors.update(meta_file(frozen).tensors)
    found, sizes, rank = decoder.plan(file)
    assert len(found.keys) == len(set(found.keys)) and rank == 64
    assert set(found.keys.values()) | found.extras.keys() == file.tensors.keys()
    assert count(found["decoder"]) == 1_687_163_840
    assert count(found["adapter"]) == 29_491_200
    assert count(found["encoder"]) == 16_727_040
    modulations = (".norm1.linear.", ".norm2.linear.")
    assert sum(count(found["decoder"], part) for part in modulations) == 354_585_600
    assert (sizes["sample_frames"], sizes["sample_height"], sizes["sample_width"]) == (17, 60, 90)
    assert (sizes["num_layers"], sizes["num_attention_heads"]) == (30, 30)
    assert sizes["spatial_interpolation_scale"] == 1.875
    assert len(found.reasons) == 5 and found.reasons.total() == len(frozen) + 3


def test_the_tables_cover_mllm_and_autoencoder_at_full_size(tmp_path):
    file = meta_file(mllm_shapes(MllmSizes()))
    found, sizes = mllm.plan(file, mistral(tmp_path, MllmSizes()))
    assert count(file.tensors) == 7_364_415_232
    assert count(found["adapter"]) == 348_622_848  # what trains in the wrapped Mistral
    assert count(found["projections"]) == 384_827_136 - 348_622_848
    assert (sizes.rank, sizes.width, sizes.inner) == (32, 1920, 4096)
    found, settings = autoencoder.plan(meta_file(autoencoder_shapes(AutoencoderSizes())))
    assert count(found["autoencoder"]) == 215_583_907 and not found.extras
    assert settings["layers_per_block"] == 3 and settings["latent_channels"] == 16


def test_tensors_go_back_as_they_came():
    rows = [
        Row("qkv.{p}", ("f/q.{p}", "f/k.{p}", "f/v.{p}"), ((0,), (1,), (2,))),
        Row("mix.{n}", ("f/a.{n}", "g/b.{n}"), ((0, 2), (3, 1))),
        Row("old.{rest}", reason="not used"),
    ]
    table = KeyTable(rows, "test")
    given = {"qkv.weight": torch.arange(12.0).view(6, 2), "mix.7": torch.arange(8.0)}
    lazy = {name: LazyTensor.of(tensor) for name, tensor in given.items()}
    found = convert(TorchFile(Path("t"), None, {**lazy, "old.x.y": lazy["mix.7"]}, {}, ()), table)
    assert found["f"]["k.weight"].make().tolist() == [[4, 5], [6, 7]]
    assert found["f"]["a.7"].make().tolist() == [0, 1, 4, 5]
    assert found["g"]["b.7"].make().tolist() == [6, 7, 2, 3]
    assert [*found.extras] == ["old.x.y"] and found.reasons == {"not used": 1}
    back = restore(table, found.files)
    assert {name: tensor.shape for name, tensor in back.items()} == {
        "qkv.weight": (6, 2),
        "mix.7": (8,),
    }
    assert all(torch.equal(back[name].make(), tensor) for name, tensor in given.items())
    with pytest.raises(CheckpointError, match=r"g: weight b\.7 is missing, mix\.7 needs it"):
        restore(table, {"f": found["f"]})
    with pytest.raises(CheckpointError, match="weight other has no place in a test"):
        restore(table, {"f": {"other": lazy["mix.7"]}})


# ---- sizes are read from the file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [
        SMALL_DECODER,
        replace(SMALL_DECODER, layers=1, heads=5, head=16, patch=2, channels=7, rank=1),
        replace(SMALL_DECODER, frames=1, rows=3, columns=1, tokens=1, scope=50, time=40),
        replace(SMALL_DECODER, frames=13, rows=7, columns=20, heads=4, head=64),
    ],
)
def test_any_size_of_decoder(sizes, dtype):
    table = positions(sizes).to(dtype)
    found, read, rank = decoder.plan(meta_file(decoder_shapes(sizes), **{POSITIONS: table}))
    assert rank == sizes.rank and found["encoder"]["text.proj.0.weight"].shape[1] == sizes.text
    assert read == {
        "num_attention_heads": sizes.heads,
        "attention_head_dim": sizes.head,
        "in_channels": sizes.channels,
        "out_channels": sizes.channels,
        "time_embed_dim": sizes.time,
        "num_layers": sizes.layers,
        "sample_width": sizes.columns * sizes.patch,
        "sample_height": sizes.rows * sizes.patch,
        "sample_frames": 4 * sizes.frames - 3,
        "patch_size": sizes.patch,
        "max_text_seq_length": sizes.tokens,
        "spatial_interpolation_scale": 1.875,
        "motion_scope_hidden": sizes.scope,
    }


# ---- strict


def plan_decoder(shapes, **values):
    return decoder.plan(meta_file(shapes, **{POSITIONS: positions(SMALL_DECODER), **values}))


@pytest.fixture
def plans(tmp_path):
    """Per file: its keys, and how it is planned."""
    base = mistral(tmp_path, SMALL_MLLM)
    return {
        "decoder": (decoder_shapes(SMALL_DECODER), plan_decoder),
        "merged decoder": (decoder_shapes(SMALL_DECODER, lora=False), plan_decoder),
        "mllm": (mllm_shapes(SMALL_MLLM), lambda s, **v: mllm.plan(meta_file(s, **v), base)),
        "autoencoder": (
            autoencoder_shapes(AutoencoderSizes((32, 64), 1, 4)),
            lambda s, **v: autoencoder.plan(meta_file(s, **v)),
        ),
    }


FILES = ("decoder", "merged decoder", "mllm", "autoencoder")


def one_of_each_kind(shapes):
    """Of keys that differ in a number alone, the last."""
    return {re.sub(r"[0-9]+", "0", key): key for key in shapes if key != POSITIONS}.values()


@pytest.mark.parametrize("file", FILES)
def test_each_key_is_needed(plans, file):
    shapes, plan = plans[file]
    plan(shapes)
    for lost in one_of_each_kind(shapes):
        with pytest.raises(CheckpointError) as error:
            plan({key: shape for key, shape in shapes.items() if key != lost})
        assert f"file.pt: key {lost} is missing" in str(error.value)


@pytest.mark.parametrize("file", FILES)
def test_each_shape_is_checked(plans, file):
    """But for the widths of T5 and CLIP, which one tensor alone has."""
    shapes, plan = plans[file]
    for key in one_of_each_kind(shapes):
        if not key.endswith(("text_proj.0.weight", "ip_proj.0.weight")) and "output_mix" not in key:
            with pytest.raises(CheckpointError, match=r"file\.pt"):
                plan({**shapes, key: (*shapes[key][:-1], shapes[key][-1] + 12)})


@pytest.mark.parametrize("file", FILES)
def test_an_unknown_key_is_named_with_an_example(plans, file):
    shapes, plan = plans[file]
    with pytest.raises(CheckpointError, match=r"key llm\.vision\.weight is unknown .* such as \w+"):
        plan({**shapes, "llm.vision.weight": (2,)})


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("other", FILES)
def test_a_file_of_another_model_is_refused(plans, file, other):
    if file.split()[-1] != other.split()[-1]:
        with pytest.raises(CheckpointError, match="others are unknown .* expected a released"):
            plans[file][1](plans[other][0])


def test_a_plain_cogvideox_is_no_released_decoder(plans):
    shapes, plan = plans["merged decoder"]
    stock = {k: v for k, v in shapes.items() if "_proj." not in k and "flow" not in k}
    with pytest.raises(CheckpointError, match=r"key \S+patch_embed.text_proj.weight is unknown"):
        plan({**stock, f"{ENGINE}mixins.patch_embed.text_proj.weight": (48, 16)})
    with pytest.raises(CheckpointError, match=r"key \S+flow_embed.0.weight is missing"):
        plan({k: v for k, v in shapes.items() if "flow" not in k})


@pytest.mark.parametrize(
    ("file", "extra", "message"),
    [
        ("decoder", "mixins.patch_embed.text_proj.4.weight", "is one too many"),
        ("decoder", "transformer.layers.7.input_layernorm.weight", r"\.3\.\S+ is missing"),
        ("decoder", "transformer.layers.0.attention.dense.matrix_A.1", "is unknown"),
        ("decoder", "transformer.layers.0.attention.dense.weight", "is unknown"),
        ("merged decoder", "transformer.layers.0.attention.dense.original.weight", "is unknown"),
        ("autoencoder", "encoder.down.0.block.0.nin_shortcut.weight", "is one too many"),
        ("autoencoder", "decoder.quant_conv.weight", "is unknown"),
        ("mllm", "input_resampler.proj.1.weight", "is one too many"),
    ],
)
def test_a_key_too_many_is_named(plans, file, extra, message):
    shapes, plan = plans[file]
    key = (ENGINE if "decoder" in file else "") + extra
    with pytest.raises(CheckpointError, match=message):
        plan({**shapes, key: (48, 3)})


def test_two_keys_for_one_weight_are_refused():
    table = KeyTable([Row("a.{n}", ("f/w",)), Row("b.{n}", ("f/w",))], "test")
    lazy = LazyTensor.of(torch.ones(1))
    with pytest.raises(CheckpointError, match=r"keys a\.0 and b\.0 are the same weight"):
        convert(TorchFile(Path("t"), None, {"a.0": lazy, "b.0": lazy}, {}, ()), table)


def test_one_lora_rank_is_expected(plans):
    shapes, plan = plans["decoder"]
    layer = f"{ENGINE}transformer.layers.2.attention.dense.matrix_"
    other = {f"{layer}A.0": (8, 48), f"{layer}B.0": (48, 8)}
    with pytest.raises(CheckpointError, match=r"key \S+layers\.2\.\S+ has LoRA rank 8, but .* 3"):
        plan({**shapes, **other})
    shapes, plan = plans["mllm"]
    layer = "llm.base_model.model.model.layers.1.mlp.up_proj.lora_"
    other = {f"{layer}A.default.weight": (8, 16), f"{layer}B.default.weight": (24, 8)}
    with pytest.raises(CheckpointError, match=r"key \S+up_proj\S+ has LoRA rank 8, .* rank 3"):
        plan({**shapes, **other})


def test_positions_that_are_no_sine_table_are_refused(plans):
    shapes, plan = plans["decoder"]
    table = positions(SMALL_DECODER)
    shuffled = torch.cat([table[:, :10], table[:, 10:].flip(1)], 1)
    for wrong in (torch.zeros_like(table), table + 0.01, table[:, :-1], shuffled, table[0]):
        with pytest.raises(CheckpointError, match=r"key \S+pos_embedding .*(table|expected)"):
            plan(shapes, **{POSITIONS: wrong})
    del shapes[POSITIONS]
    with pytest.raises(CheckpointError, match=r"key \S+pos_embedding is missing"):
        decoder.plan(meta_file(shapes))


def test_an_autoencoder_of_odd_width_is_refused():
    shapes = autoencoder_shapes(AutoencoderSizes((32, 48), 1, 4))
    with pytest.raises(CheckpointError, match="48 channels, expected a multiple of the norms' 32"):
        autoencoder.plan(meta_file(shapes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "num_hidden_layers 2, but .*config.json says 3"),
        ({"hidden": 32}, "hidden_size 16, but .* says 32"),
        ({"heads": 8}, "num_key_value_heads 4, but .*says 2"),
        ({"kv_heads": 4}, "num_key_value_heads 2, but .*says 4"),
    ],
)
def test_the_mistral_must_be_the_mllms(tmp_path, change, message):
    base = mistral(tmp_path, replace(SMALL_MLLM, **change))
    with pytest.raises(CheckpointError, match=message):
        mllm.plan(meta_file(mllm_shapes(SMALL_MLLM)), base)


def test_another_kind_of_language_base_is_refused(tmp_path):
    file = meta_file(mllm_shapes(SMALL_MLLM))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        mllm.plan(file, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type is 'llama', expected 'mistral'"):
        mllm.plan(file, tmp_path)
