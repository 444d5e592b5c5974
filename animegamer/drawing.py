"""Between pictures and ``s_a``, with a checkpoint's frozen and trained networks.

``ShotDrawer`` turns predicted representations into frames, ``ShotReader`` turns frames into
representations; both load only what they need.

Axis letters: B shots, F frames, H x W pixels, N tokens of s_a, D width.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from animegamer import config as configuration
from animegamer.checkpoint import CheckpointError, load_model
from animegamer.config import MODEL_SECTIONS, Config, ConfigError
from animegamer.game import MotionScope
from animegamer.placement import Placement, placement
from animegamer.video import to_float, to_uint8

logger = logging.getLogger(__name__)

_BACKBONES = ("autoencoder", "image_encoder", "text_encoder", "video_base", "language_base")


def with_checkpoint(config: Config) -> Config:
    """The configuration with its model part taken from the checkpoint that is played.

    Args:
        config: ``play.checkpoint`` names the directory. Where that holds ``config.yaml``, its model
            sections replace those of ``config``; where it holds ``backbones/``, those are used.

    Raises:
        CheckpointError: if there is no such directory or its ``config.yaml`` cannot be used.
    """
    directory = Path(config.play.checkpoint)
    if not directory.is_dir():
        raise CheckpointError(
            f"no checkpoint directory {directory} (play.checkpoint): expected encoder/, decoder/ "
            "and mllm/ there; checkpoints/README.md says what to put where"
        )
    if (directory / "config.yaml").is_file():
        try:
            trained = configuration.load(directory / "config.yaml")
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint's own configuration: {error}") from None
        _warn_of_differences(config, trained)
        config = replace(config, **{name: getattr(trained, name) for name in MODEL_SECTIONS})
    shipped = {
        name: str(directory / "backbones" / name)
        for name in _BACKBONES
        if (directory / "backbones" / name).is_dir()
    }
    return replace(config, backbones=replace(config.backbones, **shipped))


def _warn_of_differences(config: Config, trained: Config) -> None:
    """Says which model settings, other than defaults, give way to the checkpoint's."""
    ours = configuration.to_tree(config)
    theirs, default = configuration.to_tree(trained), configuration.to_tree(Config())
    differences = configuration.differences
    for section in MODEL_SECTIONS:
        changed = differences(default[section], ours[section])
        set_here = {line.split(":")[0] for line in changed}
        for line in differences(ours[section], theirs[section]):
            key = line.split(":")[0]
            if key in set_here and key not in _BACKBONES:
                logger.warning("the checkpoint's own model is played: %s.%s", section, line)


def load_part(directory: Path, load: Callable[[Path], Any], place: Placement) -> Any:
    """Loads one network for playing: in eval mode, in its place, without the libraries' chatter.

    Args:
        directory: where it lies.
        load: makes it from the directory.
        place: where it works and waits.

    Raises:
        CheckpointError: names the directory and what is wrong with it.
        ConfigError: if it cannot be had in the configured form.
    """
    if not directory.is_dir():
        raise CheckpointError(f"no {directory.name} in the checkpoint: {directory} is missing")
    try:
        with _quiet():
            part = load(directory)
    except (CheckpointError, ConfigError):
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        SafetensorError,
        json.JSONDecodeError,
    ) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{directory}: cannot be loaded ({reason}); a file is missing, truncated or from "
            "another version: fetch or export the checkpoint again"
        ) from error
    return place.settle(part)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps progress bars and advice of the libraries out of a player's terminal."""
    from diffusers.utils import logging as ours
    from transformers.utils import logging as theirs

    levels, bars = (ours.get_verbosity(), theirs.get_verbosity()), theirs.is_progress_bar_enabled()
    ours.set_verbosity_error()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        ours.set_verbosity(levels[0])
        theirs.set_verbosity(levels[1])
        if bars:
            theirs.enable_progress_bar()


def precision(
    config: Config, part: Literal["mllm", "decoder", "autoencoder", "reader"]
) -> torch.dtype:
    """Type of a part's weights in play. T5 overflows in float16, so the reader never has it."""
    types = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    play = config.play
    if part == "reader":
        return torch.bfloat16 if play.precision == "bf16" else torch.float32
    if part == "autoencoder":
        return types[play.autoencoder_precision or "no"]
    own = play.decoder_precision if part == "decoder" else None
    return types[own or play.precision]


@dataclass
class ShotDrawer:
    """Draws shots from representations (paper Sec. 3.2, animation shot decoder).

    Attributes:
        config: resolved configuration.
        decoder: ``animegamer.models.decoder.AnimationDecoder``.
        autoencoder: the video autoencoder.
        s_a_null: (N, D) float, the unconditional input of guidance.
    """

    config: Config
    decoder: Any
    autoencoder: Any
    s_a_null: torch.Tensor

    @classmethod
    def load(cls, config: Config) -> ShotDrawer:
        """Loads decoder and autoencoder from ``config.play.checkpoint``, and no MLLM.

        Raises:
            CheckpointError: if a part is missing or cannot be read.
        """
        config = with_checkpoint(config)
        if config.play.threads:
            torch.set_num_threads(config.play.threads)
        directory, place = (
            Path(config.play.checkpoint) / "decoder",
            placement(config.play, "decoder"),
        )

        def load_decoder(path: Path) -> Any:
            from animegamer.models.decoder_files import load_decoder

            return load_decoder(path, dtype=precision(config, "decoder"))

        def load_null(path: Path) -> torch.Tensor:
            return load_file(path / "null.safetensors")["s_a_null"]

        def load_autoencoder(_: Path) -> Any:
            from animegamer.models.backbones import load_autoencoder

            memory = config.play.memory
            return load_autoencoder(
                config.backbones,
                precision(config, "autoencoder"),
                tiling=memory.autoencoder_tiling,
                slicing=memory.autoencoder_slicing,
            )

        decoder = load_part(directory, load_decoder, place)
        null = load_part(directory, load_null, place)
        autoencoder = load_part(Path(config.backbones.autoencoder), load_autoencoder, place)
        return cls(config, decoder, autoencoder, null)

    def draw(
        self,
        s_a: np.ndarray | Sequence[np.ndarray],
        scopes: Sequence[MotionScope],
        seeds: Sequence[tuple[int, int]],
    ) -> list[np.ndarray]:
        """Draws shots, ``sampling.batch_size`` at a time.

        Args:
            s_a: (B, N, D) float, predicted or encoded representations.
            scopes: motion scope of each.
            seeds: (seed of the game, turn number) of each; a shot depends on its own alone.

        Returns:
            Per shot, uint8 (F, H, W, 3).

        Raises:
            CheckpointError: if the representations come from another checkpoint.
            FloatingPointError: if the decoder or the autoencoder gives numbers that are not finite.
        """
        return list(self.draw_each(s_a, scopes, seeds))

    @torch.no_grad()
    def draw_each(
        self,
        s_a: np.ndarray | Sequence[np.ndarray],
        scopes: Sequence[MotionScope],
        seeds: Sequence[tuple[int, int]],
    ) -> Iterator[np.ndarray]:
        """As ``draw``, one shot after the other, as the batches get ready."""
        place, size = placement(self.config.play, "decoder"), self.config.sampling.batch_size
        for s in s_a:
            if s.shape != tuple(self.s_a_null.shape):
                raise CheckpointError(
                    f"representation of shape {s.shape}, but the decoder of "
                    f"{self.config.play.checkpoint} takes {tuple(self.s_a_null.shape)}: they come "
                    "from different checkpoints"
                )
        for start in range(0, len(scopes), size):
            part = slice(start, start + size)
            with place.working(self.decoder):
                latents = self.decoder.sample(
                    torch.from_numpy(np.stack(s_a[part])).to(place.device),
                    torch.tensor([scope.scalar for scope in scopes[part]], device=place.device),
                    self.s_a_null.to(place.device),
                    self.config.sampling,
                    self.config.diffusion,
                    [_generator(*seed) for seed in seeds[part]],
                )
            with place.working(self.autoencoder):
                video = self.autoencoder.decode(latents.float()).float().cpu()
            if not torch.isfinite(video).all():
                raise FloatingPointError(
                    f"the autoencoder of {self.config.backbones.autoencoder} makes numbers that "
                    "are not finite of finite latents: set play.autoencoder_precision=bf16 or no; "
                    "if it is, fetch or make it again"
                )
            for shot in video:
                yield to_uint8(shot.permute(1, 2, 3, 0).numpy())


@dataclass
class ShotReader:
    """Makes ``s_a`` of a first frame and an action text (paper Eq. 1).

    Attributes:
        config: resolved configuration.
        encoder: ``animegamer.models.encoder.ActionAwareEncoder``.
        image_encoder: first frame to ``f_v``.
        text_encoder: action text to ``f_md``.
    """

    config: Config
    encoder: Any
    image_encoder: Any
    text_encoder: Any

    @classmethod
    def load(cls, config: Config) -> ShotReader:
        """Loads encoder, image and text encoder from ``config.play.checkpoint``.

        Raises:
            CheckpointError: if a part is missing or cannot be read.
        """
        config = with_checkpoint(config)
        backbones, place = config.backbones, placement(config.play, "reader")

        def load_encoder(path: Path) -> Any:
            from animegamer.models.encoder import ActionAwareEncoder

            return load_model(ActionAwareEncoder, path)

        def load_image(_: Path) -> Any:
            from animegamer.models.backbones import load_image_encoder

            return load_image_encoder(backbones)

        def load_text(_: Path) -> Any:
            from animegamer.models.backbones import load_text_encoder

            return load_text_encoder(backbones, precision(config, "reader"))

        return cls(
            config,
            load_part(Path(config.play.checkpoint) / "encoder", load_encoder, place),
            load_part(Path(backbones.image_encoder), load_image, place),
            load_part(Path(backbones.text_encoder), load_text, place),
        )

    @torch.no_grad()
    def read(self, frames: np.ndarray, texts: list[str]) -> np.ndarray:
        """Encodes shots.

        Args:
            frames: uint8 (B, H, W, 3), the first frame of each.
            texts: action text of each, empty where nothing is known.

        Returns:
            s_a, float32 (B, N, D).
        """
        pixels = torch.from_numpy(to_float(frames)).permute(0, 3, 1, 2)
        place = placement(self.config.play, "reader")
        with place.working(self.image_encoder, self.text_encoder, self.encoder):
            f_v = self.image_encoder(pixels.to(place.device))
            s_a = self.encoder(f_v, self.text_encoder(texts).to(f_v))
        return np.asarray(s_a.float().cpu().numpy())


def _generator(seed: int, turn: int) -> torch.Generator:
    """Noise of one shot: the same on every device and in every batch."""
    state = np.random.SeedSequence([seed % 2**63, turn]).generate_state(1, np.uint64)[0]
    return torch.Generator("cpu").manual_seed(int(state) >> 1)
