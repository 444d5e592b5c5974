"""Next game state prediction: Mistral that reads a game's history and predicts the next state.

One pass over history and instruction gives the shot's representation ``s_a_hat`` at N learnable
queries, which see each other (paper Sec. 3.2); the motion scope and the state change follow as
tokens, from the same cache and under a grammar. Files: ``mllm_files.py``.

Axis letters: B batch, T turns, L sequence, N tokens of s_a, D width of s_a, H width of Mistral.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, MistralForCausalLM

from animegamer.config import MllmConfig
from animegamer.game import CharacterState, Instruction, MotionScope, Turn
from animegamer.game_data import GameBatch, collate_rendered
from animegamer.language import (
    IGNORE,
    Language,
    LanguageError,
    add_special_tokens,
    load_tokenizer,
)
from animegamer.models.mistral import (
    CACHE,
    Quantisation,
    add_lora,
    additive,
    attention_mask,
    grow_vocabulary,
    load_mistral,
    quantisation,
    score_dtype,
)


@dataclass(frozen=True)
class Prediction:
    """Next game states of a batch of games.

    Attributes:
        s_a_hat: (B, N, D) float32.
        motion_scopes: one a game.
        changes: state change of every character named, one a game.
    """

    s_a_hat: torch.Tensor
    motion_scopes: list[MotionScope]
    changes: list[CharacterState]


class NextStateMLLM(nn.Module):
    """The MLLM of the paper (Sec. 3.2).

    ``llm`` is a stock ``MistralForCausalLM``, inside a ``PeftModel`` where LoRA is used;
    ``input_projection`` (D to H) places ``s_a`` of history turns in the sequence and
    ``output_projection`` (H to D) reads ``s_a_hat`` from the queries.

    Args:
        llm: Mistral whose vocabulary has the special tokens, wrapped or not.
        language: renders turns for its tokenizer.
        config: LoRA, projections and losses.
        width: D.
        base: directory that the LoRA was put on, or None.
    """

    def __init__(
        self,
        llm: Any,
        language: Language,
        config: MllmConfig,
        width: int,
        base: Path | None = None,
    ) -> None:
        super().__init__()
        self.llm = llm
        self.language = language
        self.config = config
        self.width = width
        self.base = base
        hidden = self.mistral.config.hidden_size
        inner = config.projection_hidden or hidden
        self.input_projection = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, hidden)
        )
        self.output_projection = nn.Sequential(
            nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, width)
        )

    @property
    def mistral(self) -> MistralForCausalLM:
        """Mistral itself, with LoRA layers in place where LoRA is used."""
        return self.llm.get_base_model() if self.config.lora.rank else self.llm

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.language.num_tokens

    @classmethod
    def from_base(
        cls,
        base: str | Path,
        config: MllmConfig,
        num_tokens: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> NextStateMLLM:
        """A new MLLM on a language base.

        The tokenizer gets the special tokens, with as many slots as the next power of two holds
        (release: 256 for 226). Release: their embeddings start at the mean of the old ones and
        their ``lm_head`` rows at three times the mean. Assumed: ``s_a`` enters at the scale of the
        words' embeddings.

        Args:
            base: directory of Mistral (transformers layout) with its tokenizer.
            config: with LoRA rank 0 the whole of Mistral is trained.
            num_tokens: N.
            width: D.
            dtype: of the weights.

        Raises:
            FileNotFoundError: if there is no such base.
            ValueError: if its files are damaged or of another model.
        """
        llm = load_mistral(Path(base), dtype)
        tokenizer = load_tokenizer(base)
        add_special_tokens(tokenizer, 1 << (num_tokens - 1).bit_length())
        grow_vocabulary(llm, len(tokenizer))
        if config.lora.rank:
            llm = add_lora(llm, config.lora)
        language = Language(tokenizer, num_tokens, config.max_turn_tokens)
        model = cls(llm, language, config, width, Path(base))
        model._enter_at_the_scale_of_words()
        model.input_projection.to(dtype)
        model.output_projection.to(dtype)
        return model.eval()

    @torch.no_grad()
    def _enter_at_the_scale_of_words(self) -> None:
        """Scales what ``input_projection`` makes of layer-normed tokens to the embeddings' size."""
        words = self.mistral.get_input_embeddings().weight.float()
        generator = torch.Generator().manual_seed(0)
        found = self.input_projection(torch.randn(256, self.width, generator=generator))
        last = self.input_projection[-1]
        for parameter in (last.weight, last.bias):
            parameter.mul_(words.square().mean().sqrt() / found.square().mean().sqrt())

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        base: str | Path | None = None,
        config: MllmConfig | None = None,
        dtype: torch.dtype = torch.float32,
        weights: Quantisation = "plain",
        device: str = "cpu",
    ) -> NextStateMLLM:
        """Loads what ``save_pretrained`` wrote; everything trainable is so again.

        Args:
            directory: the saved directory.
            base: the language base, where LoRA was saved and the base has moved.
            config: losses and noise of a new run; its shapes must be those of the saved model.
            dtype: of the weights.
            weights: ``int8`` or ``nf4`` quantises Mistral's linear layers, for play alone.
            device: where quantised layers are made.

        Raises:
            FileNotFoundError: if a file or the base is missing.
            ValueError: if a file is damaged or of another model; nothing is loaded in part.
            ConfigError: if there is no GPU, or no bitsandbytes, to quantise with.
        """
        from animegamer.models.mllm_files import load

        quantised = quantisation(weights, dtype, device)
        return load(
            cls, Path(directory), base=base, config=config, dtype=dtype, quantised=quantised
        )

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        merge: bool = False,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Saves what was trained, replacing the directory as a whole.

        ``mllm.json`` rebuilds the model; ``projections.safetensors``; ``tokenizer/``; and either
        ``adapter/`` (PEFT layout, embeddings and ``lm_head`` included) or ``language_model/``
        (transformers layout).

        Args:
            directory: where to.
            dtype: cast floats, such as to ``torch.float16``.
            merge: fold LoRA into Mistral and save it whole.
            state_dict: the weights, where they are gathered from several processes.
        """
        from animegamer.models.mllm_files import save

        save(self, Path(directory), dtype=dtype, merge=merge, state_dict=state_dict)

    def through_layers(self, device: str) -> None:
        """Leaves Mistral's layers in host memory and lets each come to a device as it is needed."""
        layers = self.mistral.model.layers
        inside = {id(tensor) for tensor in (*layers.parameters(), *layers.buffers())}
        for tensor in (*self.parameters(), *self.buffers()):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        for layer in layers:
            cpu_offload(layer, torch.device(device))

    def forward(self, batch: GameBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of paper Eq. 3 and 4: CE + alpha MSE + beta (1 - cosine).

        CE is the mean over state tokens, the others are means over queries; every predicted turn
        weighs the same.

        Args:
            batch: packed games with ``s_a`` filled.

        Returns:
            The loss, and detached metrics: ``loss``, ``ce``, ``mse``, ``cosine`` (similarity),
            ``accuracy_motion`` and ``accuracy_state`` (share of exact values, teacher-forced).
        """
        if batch.s_a is None:
            raise ValueError("batch.s_a is None: run the encoder on batch.f_v, batch.f_md first")
        hidden = self.hidden_states(batch)
        rows, places = (batch.labels != IGNORE).nonzero(as_tuple=True)
        labels = batch.labels[rows, places]
        logits = self.mistral.lm_head(hidden[rows, places - 1]).float()
        ce = functional.cross_entropy(logits, labels)

        rows, places = (batch.query >= 0).nonzero(as_tuple=True)
        predicted = self.output_projection(hidden[rows, places]).float()
        target = batch.s_a.flatten(1, 2)[rows, batch.query[rows, places]].float()
        mse = functional.mse_loss(predicted, target)
        cosine = functional.cosine_similarity(predicted, target, dim=-1).mean()

        loss = ce + self.config.alpha * mse
        if self.config.beta:
            loss = loss + self.config.beta * (1 - cosine)
        metrics = {"loss": loss, "ce": ce, "mse": mse, "cosine": cosine}
        with torch.no_grad():
            metrics |= self._accuracy(logits, labels)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _accuracy(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        strengths = torch.as_tensor(self.language.strengths, device=labels.device)
        values = torch.isin(labels, strengths)
        guess = strengths[logits[values][:, strengths].argmax(-1)]
        right = (guess == labels[values]).float().reshape(-1, 4)
        return {"accuracy_motion": right[:, 0].mean(), "accuracy_state": right[:, 1:].mean()}

    def hidden_states(self, batch: GameBatch, **options: Any) -> torch.Tensor:
        """Mistral's last hidden states, (B, L, H), under the training mask.

        Args:
            batch: tokens, with ``s_a`` where there is history.
            **options: for Mistral, such as a cache.
        """
        embeddings = self.mistral.get_input_embeddings()(batch.ids)
        rows, places = (batch.slot >= 0).nonzero(as_tuple=True)
        if batch.s_a is not None:  # also where no turn has a history: DDP waits for every gradient
            history = batch.s_a.flatten(1, 2)[rows, batch.slot[rows, places]]
            history = history.to(self.input_projection[0].weight.dtype)
            if self.training and self.config.history_noise:
                counts = (batch.slot >= 0).sum(1).tolist()
                history = history + self.config.history_noise * _noise(history, counts, batch.seeds)
            projected = self.input_projection(history).to(embeddings.dtype)
            embeddings = embeddings.index_put((rows, places), projected)
        query_turn = torch.where(batch.query >= 0, batch.query // self.num_tokens, -1)
        mask = attention_mask(batch.branch, query_turn, score_dtype(embeddings))
        options = {"use_cache": False, **options}
        return self.mistral.model(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=batch.position_ids,
            **options,
        ).last_hidden_state

    @torch.no_grad()
    def predict_packed(self, batch: GameBatch) -> torch.Tensor:
        """``s_a_hat`` of all predicted turns of packed games, given their true histories.

        Returns:
            (B, T, N, D) float32, zeros for turns that are not predicted.
        """
        if batch.s_a is None:
            raise ValueError("batch.s_a is None: run the encoder on batch.f_v, batch.f_md first")
        with _evaluation(self):
            rows, places = (batch.query >= 0).nonzero(as_tuple=True)
            predicted = self.output_projection(self.hidden_states(batch)[rows, places])
        result = torch.zeros(batch.s_a.shape, device=predicted.device)
        result.flatten(1, 2)[rows, batch.query[rows, places]] = predicted.float()
        return result

    @torch.no_grad()
    def predict(
        self, histories: Sequence[Sequence[Turn]], instructions: Sequence[Instruction]
    ) -> Prediction:
        """Predicts the next game state of each game: one pass, then three short steps.

        Args:
            histories: the past turns in view of each game, oldest first, with ``s_a`` (N, D);
                empty for window 1. An opening can only be the first.
            instructions: what is asked now, one a game.

        Raises:
            LanguageError: if a history is malformed: no ``s_a`` or one of the wrong shape, no
                motion scope or state change, an opening that is not the first turn.
            InstructionError: if an instruction is too long.
        """
        if len(histories) != len(instructions) or not instructions:
            raise ValueError(
                f"{len(histories)} histories for {len(instructions)} instructions, expected as many"
            )
        rendered = [
            self.language.render(history, instruction)
            for history, instruction in zip(histories, instructions, strict=True)
        ]
        device = self.input_projection[0].weight.device
        batch = collate_rendered(rendered).to(device)
        batch.s_a = self._history(histories).to(device)
        lengths = torch.tensor([len(r) for r in rendered], device=device)
        with _evaluation(self):
            # Without a config the cache keeps every token, whatever Mistral's sliding window.
            cache = DynamicCache()
            hidden = self.hidden_states(batch, use_cache=True, **{CACHE: cache})
            rows, places = (batch.query >= 0).nonzero(as_tuple=True)
            queries = hidden[rows, places].unflatten(0, (len(rendered), self.num_tokens))
            s_a_hat = self.output_projection(queries).float()
            last = hidden[torch.arange(len(rendered), device=device), lengths - 1]
            tokens = self._decode(last, lengths, hidden.shape[1], cache)
        states = [self.language.parse(row) for row in tokens.tolist()]
        return Prediction(s_a_hat, [scope for scope, _ in states], [change for _, change in states])

    def _history(self, histories: Sequence[Sequence[Turn]]) -> torch.Tensor:
        """The histories' ``s_a``, (B, T, N, D) float32, zeros where there is no turn."""
        shape = (self.num_tokens, self.width)
        longest = max(1, *(len(history) for history in histories))
        result = torch.zeros(len(histories), longest, *shape)
        for b, history in enumerate(histories):
            for t, turn in enumerate(history):
                s_a = turn.state.s_a
                found = None if s_a is None else tuple(np.shape(s_a))
                if found != shape:
                    raise LanguageError(
                        f"game {b}, history turn {t}: s_a is {found or 'missing'}, expected {shape}"
                    )
                result[b, t] = torch.as_tensor(s_a, dtype=torch.float32)
        return result

    def _decode(
        self, last: torch.Tensor, lengths: torch.Tensor, width: int, cache: DynamicCache
    ) -> torch.Tensor:
        """Decodes states greedily from the cache; only what the grammar leaves open is asked.

        Args:
            last: (B, H) hidden states at ``<ML>``.
            lengths: (B,) tokens of each prompt; the rest of ``width`` is padding.
            width: tokens in the cache.
            cache: of the prompts.

        Returns:
            (B, 12) int64, the tokens behind ``<ML>``.
        """
        grammar = self.language.grammar
        mistral, device = self.mistral, last.device
        seen = torch.arange(width, device=device)[None] < lengths[:, None]
        tokens: list[torch.Tensor] = []
        for place in range(0, len(grammar), 3):
            allowed = torch.as_tensor(grammar[place], device=device)
            value = allowed[mistral.lm_head(last)[:, allowed].float().argmax(-1)]
            forced = [torch.full_like(value, int(grammar[place + k][0])) for k in (1, 2)]
            step = torch.stack([value, *forced], 1)
            tokens.append(step)
            if place + 3 == len(grammar):
                break
            embeddings = mistral.get_input_embeddings()(step)
            among = torch.ones(3, 3, dtype=torch.bool, device=device).tril()
            visible = torch.cat(
                [seen[:, None].expand(-1, 3, -1), among[None].expand(len(seen), -1, -1)], 2
            )
            positions = lengths[:, None] + place + torch.arange(3, device=device)
            last = mistral.model(
                inputs_embeds=embeddings,
                attention_mask=additive(visible, score_dtype(embeddings)),
                position_ids=positions,
                use_cache=True,
                **{CACHE: cache},
            ).last_hidden_state[:, -1]
            seen = visible[:, -1]
        return torch.cat(tokens, 1)


def _noise(like: torch.Tensor, counts: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
    """Standard normal, ``counts`` rows a sample, each sample's from its own seed if it has one."""
    if not seeds:
        return torch.randn_like(like)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = zip(counts, generators, strict=True)
    return torch.cat([torch.randn(n, like.shape[1], generator=g) for n, g in rows]).to(like)


class _evaluation:
    """Evaluation mode for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._training = self._model.training
        self._model.eval()

    def __exit__(self, *_: object) -> None:
        self._model.train(self._training)
