"""The weights of the parity fixtures as the authors' files, and what the converter makes of them.

For ``test_parity.py``, and for the GPU check, which runs the same cases in half precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaTokenizer

from animegamer import config as configuration
from animegamer.convert.release import ReleaseFiles, from_release
from animegamer.game_data import GameBatch

Tensors = dict[str, torch.Tensor]


def released(tensors: Tensors, path: Path, container: str | None) -> Path:
    """Writes a fixture's state dict as the authors' file."""
    weights = {k.removeprefix("sd."): v for k, v in tensors.items() if k.startswith("sd.")}
    torch.save({container: weights} if container else weights, path)
    return path


def decoder_checkpoint(dit: Tensors, place: Path, *, merge: bool = False) -> Path:
    """A checkpoint with encoder and decoder of the fixture ``dit``, in ``place``."""
    file = released(dit, place.with_suffix(".pt"), "module")
    settings = configuration.load(None, ["decoder.lora.rank=4", "decoder.lora.alpha=1"])
    from_release(ReleaseFiles(decoder=file), place, settings, merge=merge)
    return place


def autoencoder_directory(vae: Tensors, place: Path) -> Path:
    """The autoencoder of the fixture ``vae``, below ``place``."""
    file = released(vae, place / "3d-vae.pt", "state_dict")
    from_release(ReleaseFiles(autoencoder=file), place / "ours", configuration.load())
    return place / "ours" / "backbones" / "autoencoder"


def mllm_directory(fixture: tuple[Tensors, dict[str, Any]], place: Path) -> Path:
    """The MLLM of the fixture ``mllm``, below ``place``, on a Mistral of the fixture's sizes."""
    tensors, about = fixture
    sizes = about["config"]
    words = ["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(3, 32000))]
    LlamaTokenizer({word: i for i, word in enumerate(words)}).save_pretrained(str(place / "base"))
    base = {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "rms_norm_eps": sizes["rms_norm_eps"],
        "sliding_window": sizes["sliding_window"],
    }
    (place / "base" / "config.json").write_text(json.dumps(base))
    file = released(tensors, place / "pytorch_model.bin", None)
    lora = f"{{rank: {sizes['lora_r']}, alpha: {sizes['lora_alpha']}}}"
    settings = [f"backbones.language_base={place / 'base'}", f"mllm.lora={lora}"]
    from_release(ReleaseFiles(mllm=file), place / "ours", configuration.load(None, settings))
    return place / "ours" / "mllm"


def batch_of(tensors: Tensors, case: str, history: list[int]) -> GameBatch:
    """A case's tokens as a batch; ``history`` are the turns whose s_a is placed."""

    def numbered(mask: torch.Tensor) -> torch.Tensor:
        count = mask.long().cumsum(1) - 1
        return torch.where(mask, count, -1)

    ids = tensors[f"{case}.in.input_ids"]
    attention = tensors[f"{case}.in.attention_mask"]
    query = numbered(tensors[f"{case}.in.ids_gen_mask"])
    turn = tensors.get(f"{case}.in.gen_turn_id", torch.tensor([len(history)]))
    return GameBatch(
        ids=ids,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        branch=torch.where(attention == 0, -1, 0),
        slot=numbered(tensors[f"{case}.in.ids_cmp_mask"]),
        query=torch.where(query >= 0, query + 226 * turn[:, None], -1),
        labels=tensors.get(f"{case}.in.labels", torch.full_like(ids, -100)),
        turn_mask=torch.ones(len(ids), max(1, len(history)), dtype=torch.bool),
        s_a=torch.stack([tensors[f"turn_embedding.{t}"] for t in history]).expand(
            len(ids), -1, -1, -1
        )
        if history
        else None,
    )


def history_of(about: dict[str, Any], case: str) -> list[int]:
    """The turns whose representations a case places."""
    embeddings = about[f"case {case}"]["video_embeds"]
    return [int(name.rpartition(".")[2]) for name in embeddings if name != "zeros"]
