"""Trains the text models: the sentencepiece vocabulary, T5 (span corruption), Mistral (causal)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, T5Config, T5ForConditionalGeneration

from animegamer.atomic import write_bytes
from animegamer.config import LanguageBaseSizes, TextEncoderSizes
from animegamer.data import Shuffle

SENTINELS = 4


def train_vocabulary(texts: Sequence[str], size: int, path: Path, *, llama: bool) -> None:
    """Trains a sentencepiece model on texts.

    Args:
        texts: lines in all languages of the game.
        size: pieces.
        path: where the model goes.
        llama: Mistral's special ids (unk 0, bos 1, eos 2), else T5's (pad 0, eos 1, unk 2).
    """
    special = (
        {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
        if llama
        else {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type="bpe" if llama else "unigram",
        character_coverage=1.0,
        byte_fallback=llama,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        normalization_rule_name="identity" if llama else "nmt_nfkc",
        **special,
    )
    write_bytes(path, model.getvalue())


class TokenBatch:
    """Token ids and labels, (B, L) integers; -100 is no label."""

    def __init__(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.ids, self.labels = ids, labels

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on another device."""
        return TokenBatch(self.ids.to(device), self.labels.to(device))


class TextLoss(nn.Module):
    """The library model's own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Cross entropy."""
        # Padding is 0 in both vocabularies and stands at the end; the labels leave it out.
        mask = (batch.ids != 0).long()
        loss = self.model(input_ids=batch.ids, attention_mask=mask, labels=batch.labels).loss
        return loss, {}


class Corrupted:
    """T5's task: a span of a text is replaced by a sentinel and asked for.

    Args:
        ids: token ids of each text, without the end token.
        vocabulary: pieces; the sentinels follow.
        seed: of order and spans.
    """

    def __init__(self, ids: list[list[int]], vocabulary: int, seed: int) -> None:
        self.ids, self.vocabulary, self.seed = ids, vocabulary, seed
        self.order = Shuffle(len(ids), seed)

    def __call__(self, first: int, size: int) -> TokenBatch:
        """Samples ``first`` to ``first + size - 1``."""
        inputs, labels = [], []
        for index in range(first, first + size):
            rng = np.random.default_rng((self.seed, 3, index))
            source, target = self.corrupt(self.ids[self.order[index]], rng)
            inputs.append(source)
            labels.append(target)
        return TokenBatch(pad(inputs, 0), pad(labels, -100))

    def corrupt(self, ids: list[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """One text's corrupted form and what is asked for."""
        length = max(1, len(ids) // 6)
        start = int(rng.integers(0, max(1, len(ids) - length)))
        sentinel = self.vocabulary
        source = [*ids[:start], sentinel, *ids[start + length :], 1]
        return source, [sentinel, *ids[start : start + length], 1]


def documents(games: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Texts for Mistral: up to four instructions that follow each other in a game.

    An instruction is worth more with those before it: names come back, whatever the language.

    Args:
        games: token ids of each game's instructions, in order.

    Returns:
        Token ids; a text begins with the begin token, and every instruction ends with the end
        token.
    """
    parts = [game[i : i + 4] for game in games for i in range(0, len(game), 4)]
    return [[1, *(token for line in part for token in [*line, 2])] for part in parts]


class Lines:
    """Mistral's task: the next token of texts."""

    def __init__(self, ids: list[list[int]], seed: int) -> None:
        self.ids, self.order = ids, Shuffle(len(ids), seed)

    def __call__(self, first: int, size: int) -> TokenBatch:
        """Samples ``first`` to ``first + size - 1``."""
        rows = [self.ids[self.order[index]] for index in range(first, first + size)]
        return TokenBatch(pad(rows, 0), pad(rows, -100))


def pad(rows: Sequence[list[int]], value: int) -> torch.Tensor:
    """(B, L) with ``value`` behind the shorter rows."""
    length = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def build_t5(sizes: TextEncoderSizes, vocabulary: int) -> T5ForConditionalGeneration:
    """A T5 v1.1 of the configured size; one decoder layer suffices for training."""
    config = T5Config(
        vocab_size=vocabulary + SENTINELS,
        d_model=sizes.width,
        d_kv=sizes.width // sizes.heads,
        d_ff=sizes.feed_forward,
        num_layers=sizes.layers,
        num_decoder_layers=1,
        num_heads=sizes.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def build_mistral(
    sizes: LanguageBaseSizes, vocabulary: int, words: int | None = None
) -> MistralForCausalLM:
    """A Mistral of the configured size, full attention at these lengths.

    Its embeddings are as large as what the layers add to them. As small as usual they count in the
    first layer alone, and a model of few layers cannot look from a word or a picture of the history
    to another.

    Args:
        sizes: of the model.
        vocabulary: tokens.
        words: how many of them are words; special tokens behind them start closer together.
    """
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=8192,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.07,
    )
    model = MistralForCausalLM(config)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.normal_()
        if words is not None:
            embeddings[words:].mul_(0.3)
        for layer in model.model.layers:
            for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
                added.weight.mul_(0.25)
    return model


def save_t5_tokenizer(model: Path, directory: Path) -> Any:
    """Writes the sentencepiece model as a T5 tokenizer and returns it."""
    from transformers import T5Tokenizer

    tokenizer = T5Tokenizer.from_pretrained(str(model.parent), extra_ids=SENTINELS)
    tokenizer.save_pretrained(directory)
    return tokenizer
