"""Configuration: frozen dataclasses, YAML files that say what differs, dotted overrides.

Order: dataclass defaults (the paper), then ``_base_`` files, then the file, then overrides such as
``train.lr=3e-4``. Unknown keys, wrong types and contradictions are errors that name the place.
No torch here.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from animegamer.atomic import write_text
from animegamer.game import MeterRules
from animegamer.yaml_tree import ConfigError, build, differences, merge, plain, read

__all__ = ["ConfigError", "differences"]


@dataclass(frozen=True)
class ShotConfig:
    """An animation shot. Release: 17 frames, 480 x 720, 8 fps.

    The paper says 16 frames; ``frames: 16`` gives those. CogVideoX's autoencoder takes 8 n + 1
    frames (17 make 5 latent frames) or 8 n (16 make 4).
    """

    frames: int = 17
    fps: int = 8
    height: int = 480
    width: int = 720


@dataclass(frozen=True)
class BackbonesConfig:
    """The frozen networks and the bases that are fine-tuned: where they lie and what they give.

    Attributes:
        autoencoder: directory of the video autoencoder (diffusers layout).
        image_encoder: directory of the CLIP tower (open_clip layout).
        text_encoder: directory of the T5 encoder with its tokenizer.
        video_base: directory of the text-to-video CogVideoX transformer.
        language_base: directory of the Mistral base with its tokenizer.
        latent_scale: latents are multiplied by it. Release: 1.15258426.
        text_tokens: T5 tokens of the action text, padded or cut. Release: 30.
        visual_tokens: CLIP patch tokens. Release: 196.
        image_height: height in pixels that the CLIP tower takes.
        image_width: width in pixels that the CLIP tower takes.
    """

    autoencoder: str = "checkpoints/CogVideoX-2b/vae"
    image_encoder: str = "checkpoints/CLIP-ViT-B-16-laion2B-s34B-b88K"
    text_encoder: str = "checkpoints/t5-v1_1-xxl"
    video_base: str = "checkpoints/CogVideoX-2b/transformer"
    language_base: str = "checkpoints/Mistral-7B-Instruct-v0.1"
    latent_scale: float = 1.15258426
    text_tokens: int = 30
    visual_tokens: int = 196
    image_height: int = 224
    image_width: int = 224


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter; rank 0 means none."""

    rank: int = 0
    alpha: float = 1.0
    dropout: float = 0.0


@dataclass(frozen=True)
class EncoderConfig:
    """Action-aware encoder (paper Eq. 1).

    Attributes:
        variant: ``concat`` is the paper's; ``linear`` its "w/ less para", ``addition`` and
            ``cross_attention`` its other ablations (paper App. C.3).
        visual_positions: add a fixed 2-D table to the visual tokens. Deviation: off in the paper,
            where 90,000 steps teach the decoder where a token belongs.
    """

    variant: Literal["concat", "linear", "addition", "cross_attention"] = "concat"
    visual_positions: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """Animation shot decoder: CogVideoX with LoRA and a motion-scope embedding.

    Attributes:
        motion_scope: condition on ``f_ms``; off for the ablation "w/o f_ms".
        motion_scope_hidden: width of its MLP. Release: 512.
        lora: on q, k, v and output of the attention. Release: rank 64, alpha 1.
        gradient_checkpointing: trade time for memory.
    """

    motion_scope: bool = True
    motion_scope_hidden: int = 512
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(64, 1.0))
    gradient_checkpointing: bool = False


PredictionType = Literal["v_prediction", "sample"]


@dataclass(frozen=True)
class DiffusionConfig:
    """CogVideoX's diffusion (release): v-prediction, zero terminal SNR, shifted.

    Attributes:
        prediction_type: what the decoder predicts, by diffusers' names: ``v_prediction``, or
            ``sample`` for the clean latents.
        train_steps: steps of the schedule.
        snr_shift: shift of the signal-to-noise ratio.
        beta_start: first beta.
        beta_end: last beta.
    """

    prediction_type: PredictionType = "v_prediction"
    train_steps: int = 1000
    snr_shift: float = 3.0
    beta_start: float = 0.00085
    beta_end: float = 0.012


@dataclass(frozen=True)
class SamplingConfig:
    """How a shot is sampled.

    Attributes:
        steps: sampling steps. Release: 50.
        guidance: ``dynamic`` grows monotonically over the steps; ``release`` reproduces the
            release's swinging scale; ``constant``; ``none`` runs no unconditional branch.
        scale: guidance scale. Release: 6.
        exponent: of the dynamic scale. Release: 5.
        stochastic: DPM++(2M) SDE noise (release); off gives the deterministic DPM++(2M).
        batch_size: shots sampled together.
    """

    steps: int = 50
    guidance: Literal["dynamic", "release", "constant", "none"] = "dynamic"
    scale: float = 6.0
    exponent: float = 5.0
    stochastic: bool = True
    batch_size: int = 1


@dataclass(frozen=True)
class MllmConfig:
    """MLLM: Mistral with LoRA, learnable queries, projections in and out.

    Attributes:
        lora: on q k v o gate up down. Paper: rank 32, alpha 32; release: dropout 0.05.
        projection_hidden: inner width of the projection in; None is Mistral's width.
        alpha: weight of the MSE on the queries (paper Eq. 3).
        beta: weight of the cosine loss (paper Eq. 4), 0 for the paper's main model.
        max_turn_tokens: longest turn, slots and state included. Release: 300.
        history_noise: standard deviation of noise on the history's embeddings in training.
            Deviation: 0 in the paper; hardens against the model's own predictions.
        gradient_checkpointing: trade time for memory in training.
    """

    lora: LoraConfig = field(default_factory=lambda: LoraConfig(32, 32.0, 0.05))
    projection_hidden: int | None = None
    alpha: float = 1.0
    beta: float = 0.0
    max_turn_tokens: int = 300
    history_noise: float = 0.0
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class DataConfig:
    """What a stage reads.

    Attributes:
        train: directory with ``shots.jsonl`` and ``clips/`` of the training split.
        validation: the same for validation.
        features: directory with the cached feature shards of both.
        captioned: captioned clips to pre-train on (``python -m data_pipeline.captioned``): a
            directory of WebDataset shards (tar) or of video files with their captions beside them.
        captioned_clips: how many of them are taken. Paper: 100,000 of WebVid.
        feature_batch: shots that the frozen networks encode together; one alone is slow on CPUs.
        predictions: directory with the cached ``s_a_hat`` (stage 3).
        mllm: run or checkpoint of stage 2 that predicts them.
        reference_frame: which frame gives ``f_v``; ``random`` is the ablation "w/ rand. frame".
        prediction_history: what the MLLM sees when ``s_a_hat`` is cached for stage 3: the true
            history (paper), or its ``own`` predictions, as in play.
        min_turns: shortest training subset of turns.
        max_turns: longest training subset of turns. Release: 5.
        alone_share: share of training subsets that are one turn without its history, beyond those
            that are one turn long anyway.
        sink_share: share of training subsets that open with turn 0 and skip to later turns.
        supervise_first: ``always`` predicts every subset's first turn (paper); ``game_start`` only
            those that really open their game, so that nothing unexplained is averaged.
        workers: processes for loading and for making features.
    """

    train: str = "data/train"
    validation: str = "data/validation"
    features: str = "data/features"
    captioned: str = "data/webvid/shards"
    captioned_clips: int = 100_000
    feature_batch: int = 16
    predictions: str = "data/predictions"
    mllm: str = "runs/stage2"
    reference_frame: Literal["first", "random"] = "first"
    prediction_history: Literal["true", "own"] = "true"
    min_turns: int = 1
    max_turns: int = 5
    alone_share: float = 0.0
    sink_share: float = 0.0
    supervise_first: Literal["always", "game_start"] = "always"
    workers: int = 2


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
        run: run directory.
        init: run or checkpoint directory whose weights this run starts from, or None.
        trainable: what trains; each entry must match parameters.
        steps: optimiser steps.
        batch_size: samples of a micro-batch and process: a step sees ``batch_size`` x
            ``accumulate`` x processes.
        lr: peak learning rate.
        lr_groups: other peak rates by trainable entry.
        matrix_lr: peak rate of the weight matrices of linear layers, which Muon then trains in
            AdamW's place; 0 leaves them to AdamW, as in the paper. ``lr_groups`` scale it alike.
        warmup_steps: linear rise.
        schedule: after the rise.
        min_lr_share: where the cosine ends, as a share of ``lr``.
        weight_decay: of matrices; vectors have none.
        grad_clip: largest gradient norm.
        accumulate: micro-batches a step.
        precision: Accelerate's mixed precision.
        ema_decay: 0 is none.
        text_dropout: share of action texts emptied (release: 0.05).
        image_dropout: share of visual references zeroed (release: 0.05).
        first_frame_share: share of steps, at the start, that train on first frames only.
        first_frame_batch: batch size of those steps.
        validate_every: steps between validations; 0 never.
        validation_batches: batches a validation.
        samples: shots on a sample sheet.
        save_every: steps between checkpoints.
        keep: how many checkpoints are kept.
        log_every: steps between log lines.
        seed: of everything random.
        threads: torch threads; 0 leaves it to torch.
        parallel: what several processes share: the samples of a step (``ddp``), or the weights,
            gradients and moments too (``fsdp``; ``deepspeed`` with ZeRO-2 or 3).
        processes: how many there have to be; 0 takes as many as were started.
        checkpoint: weights, averages and moments in one file each, or ``sharded``: every process
            of ``fsdp`` writes its share. The exported networks are whole in both.
        timeout_minutes: how long a process waits for the others before the job ends.
    """

    run: str = "runs/unnamed"
    init: str | None = None
    trainable: tuple[str, ...] = ()
    steps: int = 1000
    batch_size: int = 1
    lr: float = 2e-4
    lr_groups: dict[str, float] = field(default_factory=dict)
    matrix_lr: float = 0.0
    warmup_steps: int = 100
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_share: float = 0.05
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    accumulate: int = 1
    precision: Literal["no", "fp16", "bf16"] = "no"
    ema_decay: float = 0.0
    text_dropout: float = 0.05
    image_dropout: float = 0.05
    first_frame_share: float = 0.0
    first_frame_batch: int = 0
    validate_every: int = 500
    validation_batches: int = 8
    samples: int = 8
    save_every: int = 500
    keep: int = 2
    log_every: int = 20
    seed: int = 0
    threads: int = 0
    parallel: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    processes: int = 0
    checkpoint: Literal["full", "sharded"] = "full"
    timeout_minutes: float = 30.0


@dataclass(frozen=True)
class MemoryConfig:
    """Where the networks lie in play; ``configs/full/memory`` has a preset for each kind of card.

    What ``stays`` is on its device all the time. What takes ``turns`` waits in host memory and is
    on the device only while it works. Of what goes by ``layers`` one layer at a time is there: the
    least memory, and the slowest.

    Attributes:
        mllm: how the MLLM lies.
        mllm_device: torch device of the MLLM; None is ``play.device``.
        mllm_weights: ``plain`` is ``play.precision``; ``int8`` and ``nf4`` quantise Mistral's
            linear layers while they load, on a GPU, with the package bitsandbytes.
        decoder: how the decoder and the autoencoder lie; the autoencoder never goes by layers, it
            takes turns instead.
        decoder_device: likewise.
        reader: how the encoder, CLIP and T5 lie, which openings and a re-encoded past need.
        reader_device: likewise.
        autoencoder_tiling: decode shots in overlapping tiles, which changes them a little.
        autoencoder_slicing: decode the shots of a batch one after the other.
    """

    mllm: Literal["stays", "turns", "layers"] = "stays"
    mllm_device: str | None = None
    mllm_weights: Literal["plain", "int8", "nf4"] = "plain"
    decoder: Literal["stays", "turns", "layers"] = "stays"
    decoder_device: str | None = None
    reader: Literal["stays", "turns"] = "stays"
    reader_device: str | None = None
    autoencoder_tiling: bool = False
    autoencoder_slicing: bool = False


@dataclass(frozen=True)
class PlayConfig:
    """One game.

    Attributes:
        checkpoint: directory with ``encoder``, ``decoder`` and ``mllm``.
        scripts: instruction files, played as one batch.
        output: directory of the results; with several scripts, one folder each.
        upscale: videos are written this many times larger than they are drawn, for looking at
            tiny shots.
        window: turns in view, the current one included. Release: 1, which is no history.
        sink: turn 0 stays in view (0 or 1).
        history: what the past looks like to the model: the ``predicted`` representation (paper) or
            the drawn shot's first frame, ``reencoded``.
        opening: picture or shot of turn 0; overrides the script's own.
        seed: of sampling.
        device: torch device.
        precision: of the MLLM's and the decoder's weights; ``no`` is float32. Half the memory
            with ``bf16`` or ``fp16``, on a GPU. T5 follows in bf16 alone: it overflows in fp16.
        decoder_precision: of the decoder's weights; None is ``precision``. Release: fp16.
        autoencoder_precision: of the autoencoder, which decoding a shot of 480 x 720 in float32
            asks 32 GB of; None is float32. Release: fp16.
        threads: torch threads; 0 leaves it to torch.
        memory: where the networks lie.
        meters: how state changes move the meters.
    """

    checkpoint: str = "checkpoints/AnimeGamer"
    scripts: tuple[str, ...] = ("game_demo/demo.txt",)
    output: str = "results/demo"
    upscale: int = 1
    window: int = 5
    sink: int = 0
    history: Literal["predicted", "reencoded"] = "predicted"
    opening: str | None = None
    seed: int = 0
    device: str = "cpu"
    precision: Literal["no", "fp16", "bf16"] = "no"
    decoder_precision: Literal["no", "fp16", "bf16"] | None = None
    autoencoder_precision: Literal["no", "fp16", "bf16"] | None = None
    threads: int = 0
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    meters: MeterRules = field(default_factory=MeterRules)


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out games and the probes that judge them.

    Attributes:
        games: directory of the held-out games; missing ones are drawn by the built-in world.
        probes: directory of the probe classifiers; trained where missing.
        output: where ``metrics.json``, ``report.png``, the table and the played games go.
        count: games of the main set, 10 turns each.
        window_games: how many of them are played again with a window of 1.
        skill_games: games that ask for skills which a character never showed.
        language_games: games played in English, Chinese and Japanese.
        long_games: 100-turn games.
        bootstrap: resamples for the 95 % intervals.
        probe_games: games drawn to train the probes on, 10 turns and an opening each.
        probe_steps: optimiser steps of the probes.
    """

    games: str = "data/test"
    probes: str = "data/probes"
    output: str = "results/evaluation"
    count: int = 50
    window_games: int = 25
    skill_games: int = 25
    language_games: int = 10
    long_games: int = 4
    bootstrap: int = 1000
    probe_games: int = 700
    probe_steps: int = 2000


@dataclass(frozen=True)
class PlanConfig:
    """A memory plan (``scripts/plan.py``); the rest of it is the run's own settings.

    Attributes:
        layout: ``ddp`` has the whole model on every device, ``fsdp`` shards weights, gradients and
            optimiser, ``zero2`` and ``zero3`` are DeepSpeed's.
        devices: how many there are.
        device_memory: of one, in GB (1e9 bytes).
        sizes: directory of the backbones' sizes, for those whose weights are not there.
    """

    layout: Literal["ddp", "fsdp", "zero2", "zero3"] = "ddp"
    devices: int = 8
    device_memory: float = 80.0
    sizes: str = "configs/full/sizes"


@dataclass(frozen=True)
class AssembleConfig:
    """The public checkpoint (``scripts/assemble_checkpoint.py``) and the runs it is made of.

    Attributes:
        encoder: run or checkpoint of stage 1.
        decoder: run or checkpoint of stage 3, or of stage 1 where nothing was adapted.
        mllm: run or checkpoint of stage 2.
        backbones: frozen networks that go into it, by their names in ``backbones``; the others stay
            where the configuration says.
        output: the checkpoint's directory.
        vocabulary: write the names of the built-in world beside the weights.
        largest: bytes that all parts may have together; 0 sets no limit.
        largest_file: bytes that one file may have; 0 sets no limit.
        curves: runs whose learning curves go into ``learning_curves.png``.
    """

    encoder: str = "runs/stage1_joint"
    decoder: str = "runs/stage3"
    mllm: str = "runs/stage2"
    backbones: tuple[
        Literal["autoencoder", "image_encoder", "text_encoder", "video_base", "language_base"], ...
    ] = ()
    output: str = "checkpoints/AnimeGamer"
    vocabulary: bool = False
    largest: int = 0
    largest_file: int = 0
    curves: tuple[str, ...] = ()


@dataclass(frozen=True)
class PretrainSchedule:
    """Length and pace of one backbone's training."""

    steps: int = 1000
    batch_size: int = 16
    lr: float = 1e-3


@dataclass(frozen=True)
class AutoencoderSizes:
    """PatchAutoencoder; Deviation: tiny scale only."""

    latent_channels: int = 48
    patch: int = 8
    encoder_width: int = 128
    encoder_blocks: int = 2
    decoder_width: int = 160
    decoder_blocks: int = 2
    pixel_widths: tuple[int, ...] = (48, 32)
    pixel_blocks: tuple[int, ...] = (2, 1)
    train: PretrainSchedule = field(default_factory=PretrainSchedule)
    decoder_train: PretrainSchedule = field(default_factory=PretrainSchedule)


@dataclass(frozen=True)
class ImageEncoderSizes:
    """CLIP in open_clip's terms; ``mlp_ratio`` and ``layers`` of the image tower."""

    patch: int = 16
    width: int = 192
    layers: int = 3
    head_width: int = 48
    mlp_ratio: float = 2.0
    embed_dim: int = 128
    text_width: int = 96
    text_layers: int = 2
    text_length: int = 24
    train: PretrainSchedule = field(default_factory=PretrainSchedule)


@dataclass(frozen=True)
class TextEncoderSizes:
    """T5, and the sentencepiece vocabulary that the tiny text models share."""

    vocabulary: int = 600
    width: int = 128
    layers: int = 2
    heads: int = 4
    feed_forward: int = 256
    train: PretrainSchedule = field(default_factory=PretrainSchedule)


@dataclass(frozen=True)
class LanguageBaseSizes:
    """Mistral."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 1
    feed_forward: int = 320
    train: PretrainSchedule = field(default_factory=PretrainSchedule)


@dataclass(frozen=True)
class VideoBaseSizes:
    """Text-to-video CogVideoX. Its training follows the ``train`` section."""

    heads: int = 3
    head_width: int = 64
    layers: int = 4
    time_embed: int = 48
    text_tokens: int = 24


@dataclass(frozen=True)
class PretrainConfig:
    """Sizes and schedules of the tiny backbones (``scripts/train_backbones.py``).

    Attributes:
        parts: what is trained, in order; ``text`` is the vocabulary, T5 and Mistral,
            ``autoencoder_decoder`` goes on with the autoencoder's decoder alone, which leaves the
            latents as they are and may run beside the later stages.
        clips: clips whose pixels the autoencoder and the CLIP tower are trained on.
    """

    parts: tuple[Literal["text", "image_encoder", "autoencoder", "autoencoder_decoder"], ...] = (
        "text",
        "image_encoder",
        "autoencoder",
        "autoencoder_decoder",
    )
    clips: int = 4000
    autoencoder: AutoencoderSizes = field(default_factory=AutoencoderSizes)
    image_encoder: ImageEncoderSizes = field(default_factory=ImageEncoderSizes)
    text_encoder: TextEncoderSizes = field(default_factory=TextEncoderSizes)
    language_base: LanguageBaseSizes = field(default_factory=LanguageBaseSizes)
    video_base: VideoBaseSizes = field(default_factory=VideoBaseSizes)


MODEL_SECTIONS = ("shot", "backbones", "encoder", "decoder", "diffusion", "mllm")
"""The model's part, which a checkpoint's ``config.yaml`` holds and play takes from there."""


@dataclass(frozen=True)
class Config:
    """Everything that one script reads."""

    shot: ShotConfig = field(default_factory=ShotConfig)
    backbones: BackbonesConfig = field(default_factory=BackbonesConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    mllm: MllmConfig = field(default_factory=MllmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    play: PlayConfig = field(default_factory=PlayConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    assemble: AssembleConfig = field(default_factory=AssembleConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)


def load(path: str | Path | None = None, overrides: typing.Sequence[str] = ()) -> Config:
    """Loads a configuration.

    Args:
        path: YAML file, or None for the defaults.
        overrides: ``section.key=value``, the value read as YAML.

    Raises:
        ConfigError: unknown key, wrong type, conflicting bases, or settings that contradict.
    """
    tree = read(Path(path), from_tree) if path is not None else {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip("-"):
            raise ConfigError(f"override {override!r}: expected section.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: {error}") from None
        branch: dict[str, Any] = {}
        leaf = branch
        *parents, last = key.lstrip("-").split(".")
        for parent in parents:
            leaf = leaf.setdefault(parent, {})
        leaf[last] = value
        from_tree(branch, f"override {override!r}")
        tree = merge(tree, branch)
    config = from_tree(tree, str(path or "configuration"))
    check(config)
    return config


def from_tree(tree: dict[str, Any], where: str = "configuration") -> Config:
    """Builds a Config from nested mappings. Raises ConfigError."""
    return typing.cast(Config, build(Config, tree, where))


def to_tree(config: Any) -> dict[str, Any]:
    """Nested plain mappings of a configuration."""
    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))


def save(config: Config, path: str | Path) -> None:
    """Writes the resolved configuration as YAML, atomically."""
    write_text(path, yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True))


def check(config: Config) -> None:
    """Checks settings against each other. Raises ConfigError."""
    shot, train, play = config.shot, config.train, config.play
    if (shot.frames - 1) % 4 and shot.frames % 8:
        raise ConfigError(
            f"shot.frames is {shot.frames}, expected 4 n + 1 (such as 17) or 8 n (such as 16)"
        )
    if not 1 <= config.data.min_turns <= config.data.max_turns:
        raise ConfigError(
            f"data.min_turns is {config.data.min_turns} and data.max_turns "
            f"{config.data.max_turns}, expected 1 <= min_turns <= max_turns"
        )
    for key in (
        "steps",
        "batch_size",
        "accumulate",
        "save_every",
        "log_every",
        "keep",
        "samples",
        "validation_batches",
    ):
        if getattr(train, key) < 1:
            raise ConfigError(f"train.{key} is {getattr(train, key)}, expected 1 or more")
    for key in ("text_dropout", "image_dropout", "first_frame_share", "min_lr_share"):
        if not 0 <= getattr(train, key) <= 1:
            raise ConfigError(f"train.{key} is {getattr(train, key)}, expected 0 to 1")
    if train.matrix_lr and not (train.lr > 0 and train.matrix_lr > 0):
        raise ConfigError(
            f"train.matrix_lr is {train.matrix_lr} and train.lr {train.lr}, expected both above 0"
        )
    if not 0 <= train.ema_decay < 1:
        raise ConfigError(f"train.ema_decay is {train.ema_decay}, expected 0 <= decay < 1")
    _check_parallel(train)
    if play.window < 1 or play.sink not in (0, 1):
        raise ConfigError(
            f"play.window is {play.window} and play.sink {play.sink}, expected window >= 1 "
            "(1 is no history) and sink 0 or 1"
        )
    if play.memory.mllm_weights != "plain" and play.memory.mllm != "stays":
        raise ConfigError(
            f"play.memory.mllm_weights is {play.memory.mllm_weights} and play.memory.mllm "
            f"{play.memory.mllm}: a quantised MLLM stays on its device; set play.memory.mllm=stays"
        )
    if config.plan.devices < 1 or config.plan.device_memory <= 0:
        raise ConfigError(
            f"plan.devices is {config.plan.devices} and plan.device_memory "
            f"{config.plan.device_memory}, expected 1 or more and above 0"
        )
    if config.sampling.steps < 1 or config.sampling.steps > config.diffusion.train_steps:
        raise ConfigError(
            f"sampling.steps is {config.sampling.steps}, expected 1 to "
            f"{config.diffusion.train_steps}"
        )


def _check_parallel(train: TrainConfig) -> None:
    if train.processes < 0 or train.timeout_minutes <= 0:
        raise ConfigError(
            f"train.processes is {train.processes} and train.timeout_minutes "
            f"{train.timeout_minutes}, expected processes >= 0 and a timeout above 0"
        )
    if train.checkpoint == "sharded" and train.parallel != "fsdp":
        raise ConfigError(
            f"train.checkpoint is sharded and train.parallel {train.parallel}: only fsdp has "
            "shards to write; set train.checkpoint=full"
        )
    if train.parallel != "ddp" and train.precision == "fp16":
        raise ConfigError(
            f"train.parallel is {train.parallel} and train.precision fp16: set it to bf16 or no"
        )
    if train.parallel == "deepspeed":
        for key in ("ema_decay", "matrix_lr"):
            if getattr(train, key):
                raise ConfigError(
                    f"train.{key} is {getattr(train, key)}: DeepSpeed does not do this; set it to "
                    "0, or train.parallel to ddp or fsdp"
                )
