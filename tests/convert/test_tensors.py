"""Reading without running anything, writing shard by shard, merging."""

from __future__ import annotations

import argparse
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import CheckpointError
from animegamer.convert.tensors import (
    LazyTensor,
    merge_lora,
    read_safetensors,
    read_torch,
    write_safetensors,
    write_torch,
)

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(2, dtype=torch.float16)}


def values(lazy):
    return {name: tensor.make() for name, tensor in lazy.items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


# ---- files of torch.save


@pytest.mark.parametrize("container", [None, "module", "state_dict", "model"])
def test_weights_are_found_bare_or_wrapped(tmp_path, container):
    torch.save({container: WEIGHTS, "iteration": 3} if container else WEIGHTS, tmp_path / "w.pt")
    file = read_torch(tmp_path / "w.pt")
    assert file.container == container and file.beside == ({"iteration": 3} if container else {})
    same(values(file.tensors), WEIGHTS)
    assert file.tensors["a.weight"].shape == (2, 3) and file.tensors["b.bias"].nbytes == 4
    write_torch(tmp_path / "again.pt", file.tensors, file.container, file.beside)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again.keys() == ({container, "iteration"} if container else WEIGHTS.keys())
    same(again[container] if container else again, WEIGHTS)


def test_what_training_leaves_beside_the_weights_is_left_out(tmp_path):
    beside = {
        "args": argparse.Namespace(lr=1e-4, model_parallel_size=1),
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "param_shapes": [{"a.weight": torch.Size([2, 3])}],
        "names": {"x"},
    }
    torch.save({"module": WEIGHTS, "global_steps": 9, **beside}, tmp_path / "w.pt")
    file = read_torch(tmp_path / "w.pt")
    assert file.ignored == tuple(sorted(beside)) and file.beside == {"global_steps": 9}
    same(values(file.tensors), WEIGHTS)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("inside", [True, False])
def test_a_pickle_that_runs_code_is_refused(tmp_path, inside):
    trap = Attack(str(tmp_path / "harm"))
    torch.save({"module": {**WEIGHTS, "c": trap}} if inside else trap, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: refused, it holds \S*open, .*run code"):
        read_torch(tmp_path / "w.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(trap))
    with pytest.raises(CheckpointError, match="not a whole file of torch.save"):
        read_torch(tmp_path / "bare.pt")
    assert not (tmp_path / "harm").exists()


def test_a_damaged_file_is_named_with_its_size(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(WEIGHTS, path)
    content = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 26000000000\n"
    for damaged in (content[:-50], content[: len(content) // 2], b"", b"\x00" * 99, pointer):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"w\.pt \({len(damaged)} bytes\): not a whole"):
            read_torch(path)
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="expected its zip format"):
        read_torch(path)
    with pytest.raises(FileNotFoundError, match="no file .*none.pt"):
        read_torch(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no weights found"),
        ({"epoch": 3}, r"no weights found; expected tensors .* found \['epoch'\]"),
        ([torch.ones(2)], "found list"),
        ({"module": {"a": torch.ones(1), "b": 3}}, r"module\['b'\] is a int, expected a tensor"),
    ],
)
def test_a_file_without_weights_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        read_torch(tmp_path / "w.pt")


# ---- safetensors


@pytest.mark.parametrize(("limit", "files"), [(None, 1), (10**9, 1), (100, 4), (1, 8)])
def test_shards_hold_what_fits(tmp_path, limit, files):
    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(8)}  # 40 bytes each
    lazy = {name: LazyTensor.of(tensor) for name, tensor in weights.items()}
    write_safetensors(tmp_path, "model", lazy, limit)
    found = sorted(tmp_path.glob("*.safetensors"))
    assert len(found) == files and (tmp_path / "model.safetensors").is_file() == (files == 1)
    same(values(read_safetensors(tmp_path, "model")), weights)
    same({k: v for file in found for k, v in load_file(file).items()}, weights)


@pytest.mark.parametrize(("limit", "most"), [(160, 5), (None, 40)])
def test_only_one_shard_is_in_memory(tmp_path, limit, most):
    """So a file of 26 GB needs little more than a shard where tensors are computed."""
    alive, peak = [0], [0]

    def gone():
        alive[0] -= 1

    def make():
        alive[0] += 1
        peak[0] = max(peak[0], alive[0])
        tensor = torch.ones(10)
        weakref.finalize(tensor, gone)
        return tensor

    lazy = {f"w{i}": LazyTensor((10,), torch.float32, make) for i in range(40)}
    write_safetensors(tmp_path, "model", lazy, limit)
    assert alive[0] == 0 and most - 1 <= peak[0] <= most


def test_two_names_of_one_memory_are_written_apart(tmp_path):
    tied = torch.ones(3)
    lazy = {name: LazyTensor.of(tied) for name in ("shared.weight", "encoder.embed_tokens.weight")}
    write_safetensors(tmp_path, "model", lazy)
    assert len(load_file(tmp_path / "model.safetensors")) == 2


def test_damaged_shards_are_named(tmp_path):
    weights = {f"w{i}": LazyTensor.of(torch.ones(10)) for i in range(3)}
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        read_safetensors(tmp_path, "model")
    write_safetensors(tmp_path, "model", weights, 50)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(CheckpointError, match="w1 is in model.safetensors.index.json, but in no"):
        read_safetensors(tmp_path, "model")
    shard.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        read_safetensors(tmp_path, "model")


# ---- LoRA


def test_merging_adds_the_product_and_takes_what_trained_whole():
    torch.manual_seed(0)
    down, up = torch.randn(2, 5), torch.randn(4, 2)
    base = {"layer.weight": torch.randn(4, 5).half(), "norm.weight": torch.ones(4)}
    adapter = {"layer.lora_A.weight": down, "layer.lora_B.weight": up, "norm.weight": 2 * up[:, 0]}
    merged = values(
        merge_lora(
            {name: LazyTensor.of(t) for name, t in base.items()},
            {f"base_model.model.{name}": LazyTensor.of(t) for name, t in adapter.items()},
            0.25,
        )
    )
    expected = (base["layer.weight"].float() + 0.25 * up @ down).half()
    same(merged, {"layer.weight": expected, "norm.weight": 2 * up[:, 0]})
