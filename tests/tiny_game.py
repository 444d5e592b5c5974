"""A tiny language base and made-up games for the tests of stage 2 and of play."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import sentencepiece
import torch
from transformers import MistralConfig, MistralForCausalLM

from animegamer.config import LoraConfig, MllmConfig
from animegamer.game import CharacterState, GameState, Instruction, MotionScope, Turn
from animegamer.language import save_tokenizer
from animegamer.models.mllm import NextStateMLLM

NUM_TOKENS, WIDTH = 6, 10
WHO, WHAT, WHERE = (
    ("Nilo", "Mavi", "Juno"),
    ("walk", "gently talk", "run"),
    ("night town", "day sea"),
)


def instruction(seed: int) -> Instruction:
    random = np.random.default_rng(seed)
    who = random.permutation(WHO)[: random.integers(1, 3)]
    return Instruction(tuple(who), str(random.choice(WHAT)), str(random.choice(WHERE)))


def turn(seed: int, *, opening: bool = False) -> Turn:
    """A played turn with random state and s_a (N, D)."""
    random = np.random.default_rng((seed, 1))
    s_a = random.standard_normal((NUM_TOKENS, WIDTH)).astype(np.float32)
    if opening:
        return Turn(None, GameState(None, None, s_a))
    change = CharacterState(*(int(k) for k in random.integers(-5, 6, 3)))
    return Turn(instruction(seed), GameState(MotionScope(int(random.integers(1, 6))), change, s_a))


def make_base(directory: Path) -> Path:
    """A language base: random Mistral and a sentencepiece tokenizer trained on a few lines."""
    directory.mkdir(parents=True, exist_ok=True)
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(str(instruction(seed)) for seed in range(60)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    tokenizer = save_tokenizer(directory / "tokenizer.model", directory)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(str(directory))
    return directory


def make_mllm(base: Path, *, rank: int = 0, **settings: float) -> NextStateMLLM:
    torch.manual_seed(1)
    config = MllmConfig(lora=LoraConfig(rank, 4.0, 0.05), **settings)
    return NextStateMLLM.from_base(base, config, NUM_TOKENS, WIDTH).eval()
