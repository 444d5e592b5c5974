"""Do the memory presets play as the plain configuration does, with two layers of each network?

Networks have their full width, weights are random, and everything is loaded from files, as in play:
quantised layers come into being no other way. The shots of all presets are drawn of the same
``s_a``, so that MLLM and decoder are judged by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaTokenizer, MistralConfig, MistralForCausalLM

from animegamer.config import Config, MemoryConfig
from animegamer.models import skeleton
from animegamer.models.mllm import NextStateMLLM
from animegamer.session import GameSession
from benchmarks.full_size import INSTRUCTION, planned_peak
from benchmarks.report import peak, used

LAYERS = 2
PRESETS = ("one_large", "two_24gb", "one_24gb", "one_24gb_int8", "one_12gb_nf4", "one_8gb")
_STEPS = "sampling.steps=4"
# Relative error of s_a_hat: the same kernels on the same weights, or linear layers in 8 and 4 bits.
# Random weights of width 1024, rounded so on a CPU, give 0.03 and 0.22, and more with the width;
# another s_a_hat gives 1.4.
MLLM_TOLERANCE = {"plain": 1e-3, "int8": 0.1, "nf4": 0.5}
# Mean difference of the frames over their deviation; normalisation sees a tile, not the picture.
SHOT_TOLERANCE = {"whole": 0.01, "tiled": 0.2}


def preset_checks(
    load: Callable[..., Config], device: str
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A name and a check for every preset."""
    with TemporaryDirectory() as place:
        less = _reduced(load("play"), Path(place) / "sizes")
        checkpoint = Path(place) / "checkpoint"
        own = [_STEPS, "decoder.lora.rank=0", f"play.checkpoint={checkpoint}", *less]

        @cache
        def plain(*precisions: str) -> tuple[list[Any], Any]:
            """States and a shot with everything where it stays, in the types of a preset."""
            if not checkpoint.is_dir():
                make_checkpoint(load("play", *own), checkpoint)
            return _play(_plainly(load("play", *own), precisions))

        for name in PRESETS:
            config = load(f"memory/{name}", *own)
            yield name, lambda config=config: _compare(config, plain, device)


def _reduced(config: Config, directory: Path) -> list[str]:
    """Writes the sizes with fewer layers; overrides that name them."""
    directory.mkdir()
    kept = ("autoencoder", "image_encoder", "text_encoder")
    trees = {name: skeleton.sizes(config, name) for name in kept}
    trees["image_encoder"] = {"model_cfg": trees["image_encoder"]}
    for name, key in (("language_base", "num_hidden_layers"), ("video_base", "num_layers")):
        trees[name] = {**skeleton.sizes(config, name), key: LAYERS}
    for name, tree in trees.items():
        (directory / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
    return [f"plan.sizes={directory}", *(f"backbones.{name}=none" for name in trees)]


def _plainly(config: Config, precisions: tuple[str, ...]) -> Config:
    precision, decoder, autoencoder = precisions
    play = replace(
        config.play,
        memory=MemoryConfig(),
        precision=precision,
        decoder_precision=decoder,
        autoencoder_precision=autoencoder,
    )
    return replace(config, play=play)


def make_checkpoint(config: Config, directory: Path) -> None:
    """Writes random networks of the configured sizes: MLLM with LoRA, decoder, autoencoder."""
    torch.manual_seed(0)
    base, sizes = directory / "backbones/language_base", skeleton.sizes(config, "language_base")
    words = ["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(3, sizes["vocab_size"]))]
    LlamaTokenizer({word: i for i, word in enumerate(words)}).save_pretrained(str(base))
    sizes.pop("model_type", None)
    MistralForCausalLM(MistralConfig(**sizes)).to(torch.bfloat16).save_pretrained(base)
    encoder, decoder = skeleton.encoder_and_decoder(config)
    mllm = NextStateMLLM.from_base(
        base, config.mllm, encoder.num_tokens, encoder.config.width, dtype=torch.bfloat16
    )
    for name, parameter in mllm.named_parameters():
        if ".lora_B." in name:  # starts at zero, and would change nothing
            torch.nn.init.normal_(parameter, std=0.02)
    mllm.save_pretrained(directory / "mllm", dtype=torch.bfloat16)
    decoder.half().save_pretrained(directory / "decoder")
    save_file({"s_a_null": encoder.null().detach()}, directory / "decoder" / "null.safetensors")
    skeleton.autoencoder(config).half().save_pretrained(directory / "backbones/autoencoder")


def _play(config: Config, s_a: np.ndarray | None = None) -> tuple[list[Any], np.ndarray]:
    """Two turns' states, and one shot of ``s_a``, or of the first of them."""
    session = GameSession.load(config)
    drawer, session.drawer = session.drawer, None
    assert drawer is not None
    states = [session.step(INSTRUCTION) for _ in range(2)]
    given = states[0].s_a if s_a is None else s_a
    return states, drawer.draw([given], [states[0].motion_scope], [(0, 1)])[0]


def _compare(config: Config, plain: Callable[..., Any], device: str) -> dict[str, Any]:
    play, memory = config.play, config.play.memory
    states, shot = plain(play.precision, play.decoder_precision, play.autoencoder_precision)
    before = used(device)
    # The scope decides how much moves; of quantised weights it may be another.
    found, drawn = _play(config, states[0].s_a)
    most = peak(device, before)
    quantised = memory.mllm_weights != "plain"
    turns = 1 if quantised else len(states)  # a second one reads the error of the first
    pairs = [(a.s_a, b.s_a) for a, b in zip(found[:turns], states[:turns], strict=True)]
    error = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    same = all(
        (a.change, a.motion_scope) == (b.change, b.motion_scope)
        for a, b in zip(found, states, strict=True)
    )
    other = float(np.abs(drawn.astype(float) - shot).mean() / shot.std())
    tolerance = MLLM_TOLERANCE[memory.mllm_weights]
    allowed = SHOT_TOLERANCE["tiled" if memory.autoencoder_tiling else "whole"]
    return {
        "MLLM": f"{memory.mllm}, {memory.mllm_weights}",
        "decoder": memory.decoder + (", tiled" if memory.autoencoder_tiling else ""),
        "s_a error": error,
        "s_a tolerance": tolerance,
        "same states": "yes" if same else "no",
        "shot error": other,
        "shot tolerance": allowed,
        "peak (GB)": most,
        "planned (GB)": planned_peak(config),
        "passed": error <= tolerance and other <= allowed and (same or quantised),
    }
