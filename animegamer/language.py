"""The game as language: special tokens, prompts, and states read back from tokens.

A game state is written in the release's layout, and only here:
``<TURN>`` instruction ``<img><frame>`` N slots ``</frame></img>`` ``<ML>`` level ``</ML>``
``<SC>`` social ``</SC>`` ``<ET>`` entertainment ``</ET>`` ``<ST>`` stamina ``</ST></TURN>``,
after one BOS. No torch here; transformers is imported when a tokenizer is loaded.

Axis letters: L sequence, N tokens of s_a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from animegamer.game import (
    MAX_CHANGE,
    CharacterState,
    GameState,
    Instruction,
    InstructionError,
    MotionScope,
    Turn,
)

MAX_TURN_TOKENS = 300
"""Release: longest turn, slots and state tokens included."""
IGNORE = -100
"""Label of a token that no loss asks for."""

_TEXTS = 100_000  # instructions whose tokens are remembered

Ints = npt.NDArray[np.int64]

# Release: the order in which a state is written. ML is the motion level, and the three tags after
# it are social, entertainment and stamina, not the paper's order.
_STATE_TAGS = ("ML", "SC", "ET", "ST")
_FIELDS = ("social", "entertainment", "stamina")
_OPEN_SLOTS, _CLOSE_SLOTS = ("<img>", "<frame>"), ("</frame>", "</img>")


class LanguageError(ValueError):
    """Tokens or a history that do not follow the layout of a game."""


def special_tokens(frames: int = 256) -> list[str]:
    """The special tokens in the release's order.

    Args:
        frames: how many ``<frame_i>`` slots. Release: 256, of which N = 226 are used.
    """
    tags = [f"<{slash}{name}>" for name in ("img", "vid", "frame") for slash in ("", "/")]
    strengths = [f"<Strength_{k}>" for k in range(-MAX_CHANGE, MAX_CHANGE + 1)]
    states = [f"<{slash}{name}>" for name in (*_STATE_TAGS, "TURN") for slash in ("", "/")]
    return [*(f"<frame_{i:05d}>" for i in range(frames)), *tags, *strengths, "<visual>", *states]


def add_special_tokens(tokenizer: Any, frames: int = 256) -> int:
    """Adds the special tokens behind the tokenizer's own; on Mistral they are 32000 to 32283.

    Args:
        tokenizer: a transformers tokenizer; changed in place.
        frames: how many ``<frame_i>`` slots.

    Returns:
        How many tokens were added; 0 if all were there.
    """
    from tokenizers import AddedToken

    tokens = [AddedToken(t, normalized=False, special=True) for t in special_tokens(frames)]
    return int(tokenizer.add_tokens(tokens, special_tokens=True))


def load_tokenizer(directory: str | Path) -> Any:
    """Loads the tokenizer of a Mistral directory (``tokenizer.json`` or ``tokenizer.model``).

    Release: not ``legacy``, so that text behind ``<TURN>`` begins without a space marker.

    Raises:
        FileNotFoundError: if the directory holds no tokenizer.
    """
    directory = Path(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise FileNotFoundError(f"no tokenizer.json or tokenizer.model in {directory}")
    from transformers import LlamaTokenizer

    return LlamaTokenizer.from_pretrained(str(directory), legacy=False, local_files_only=True)


def save_tokenizer(model: str | Path, directory: str | Path, frames: int | None = None) -> Any:
    """Makes a tokenizer directory out of a sentencepiece BPE model.

    Train it with ``model_type="bpe"``, ``byte_fallback=True``,
    ``normalization_rule_name="identity"`` and sentencepiece's ids (unk 0, bos 1, eos 2), which is
    how Mistral's was trained.

    Args:
        model: the sentencepiece ``.model`` file.
        directory: where ``tokenizer.json`` and ``tokenizer_config.json`` go.
        frames: add the special tokens with that many slots; None leaves that to
            ``NextStateMLLM.from_base``.

    Returns:
        The tokenizer.
    """
    from transformers import LlamaTokenizer

    tokenizer = LlamaTokenizer.from_pretrained(
        str(Path(model).parent), vocab_file=str(model), legacy=False, local_files_only=True
    )
    if frames is not None:
        add_special_tokens(tokenizer, frames)
    tokenizer.save_pretrained(str(directory))
    return tokenizer


@dataclass(frozen=True)
class Rendered:
    """A sequence of tokens and what the model does with each; every field is int64 (L,).

    Attributes:
        ids: token ids.
        position_ids: position of the token in its turn's own sequence, from 0.
        branch: 0 for what all later tokens see; a number above 0 is seen by its own branch only
            (in packed training, the prediction of a turn).
        slot: ``t * N + n`` where token n of history turn t's ``s_a`` takes the token's place, or
            -1.
        query: ``t * N + n`` where the model predicts token n of turn t's ``s_a``, or -1. Queries of
            one turn see each other.
        labels: the token's id where it is a state token to predict, else ``IGNORE``.
    """

    ids: Ints
    position_ids: Ints
    branch: Ints
    slot: Ints
    query: Ints
    labels: Ints

    def __len__(self) -> int:
        return len(self.ids)


class Language:
    """Renders turns to tokens and reads states back, for one tokenizer and one N.

    Args:
        tokenizer: transformers tokenizer that has the special tokens.
        num_tokens: N, how many tokens one ``s_a`` takes.
        max_turn_tokens: longest turn. Release: 300.

    Raises:
        LanguageError: if the tokenizer lacks special tokens, or has fewer slots than N.
    """

    def __init__(
        self, tokenizer: Any, num_tokens: int, max_turn_tokens: int = MAX_TURN_TOKENS
    ) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens
        names = special_tokens(num_tokens)
        ids = tokenizer.convert_tokens_to_ids(names)
        unknown = [
            name
            for name, i in zip(names, ids, strict=True)
            if i is None or i == tokenizer.unk_token_id
        ]
        if unknown:
            raise LanguageError(
                f"the tokenizer lacks {len(unknown)} special tokens, the first {unknown[0]!r}; "
                f"call add_special_tokens with at least {num_tokens} frames"
            )
        self._id: dict[str, int] = dict(zip(names, ids, strict=True))
        self._name = {i: name for name, i in self._id.items()}
        self.strengths: Ints = self._ids(
            f"<Strength_{k}>" for k in range(-MAX_CHANGE, 1 + MAX_CHANGE)
        )
        self.levels: Ints = self._ids(
            f"<Strength_{k}>" for k in range(1, 1 + len(MotionScope.SCALARS))
        )
        self.bos_id: int = tokenizer.bos_token_id
        self._turn, self._end_turn = self._id["<TURN>"], self._id["</TURN>"]
        frames = self._ids(f"<frame_{i:05d}>" for i in range(num_tokens))
        self._slots: Ints = np.concatenate(
            [self._ids(_OPEN_SLOTS), frames, self._ids(_CLOSE_SLOTS)]
        )
        # What follows <ML>: at each place the ids that may stand there. A place with one id needs
        # no model.
        self.grammar: list[Ints] = []
        for tag, following in zip(_STATE_TAGS, (*_STATE_TAGS[1:], None), strict=True):
            values = self.levels if tag == "ML" else self.strengths
            after = "</TURN>" if following is None else f"<{following}>"
            self.grammar += [values, self._ids([f"</{tag}>"]), self._ids([after])]
        self.max_text_tokens = max_turn_tokens - len(self._slots) - len(self.grammar) - 2
        if self.max_text_tokens < 1:
            raise LanguageError(
                f"{num_tokens} slots leave no room for an instruction in a turn of "
                f"{max_turn_tokens} tokens"
            )
        added = tokenizer.get_added_vocab().items()
        self._reserved = {i: name for name, i in added if i != tokenizer.unk_token_id}
        self._texts: dict[str, Ints] = {}

    def _ids(self, names: Any) -> Ints:
        return np.array([self._id[name] for name in names], dtype=np.int64)

    def text_ids(self, instruction: Instruction | None) -> Ints:
        """``<TURN>`` and the instruction's tokens; ``<TURN>`` alone for an opening.

        An instruction that is too long is refused, not cut: what would be lost is the background.

        Raises:
            InstructionError: if it is longer than a turn has room for, or spells a special token.
        """
        text = "" if instruction is None else str(instruction)
        if text not in self._texts:
            ids = self.tokenizer("<TURN>" + text, add_special_tokens=False)["input_ids"]
            found = [self._reserved[i] for i in ids[1:] if i in self._reserved]
            if found:
                raise InstructionError(f"instruction {text!r} holds the reserved word {found[0]!r}")
            if len(ids) - 1 > self.max_text_tokens:
                raise InstructionError(
                    f"instruction of {len(ids) - 1} tokens, at most {self.max_text_tokens} fit "
                    f"beside the {self.num_tokens} slots of a turn; shorten it: {text!r}"
                )
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            self._texts[text] = np.array(ids, dtype=np.int64)
        return self._texts[text]

    def state_ids(self, motion_scope: MotionScope, change: CharacterState) -> Ints:
        """A state as tokens, ``<ML>`` to ``</ST></TURN>``."""
        values = (motion_scope.level, *(getattr(change, field) for field in _FIELDS))
        ids = np.array([self._id["<ML>"], *(allowed[0] for allowed in self.grammar)], np.int64)
        ids[1::3] = self.strengths[np.array(values) + MAX_CHANGE]
        return ids

    def parse(self, ids: Sequence[int] | Ints) -> tuple[MotionScope, CharacterState]:
        """Reads a state back from its tokens, from ``<ML>`` (or right behind it) on.

        Raises:
            LanguageError: with the first place that does not follow the layout.
        """
        found = [int(i) for i in ids]
        if found and found[0] == self._id["<ML>"]:
            found = found[1:]
        if len(found) < len(self.grammar) - 1:
            raise LanguageError(
                f"a state has {len(self.grammar)} tokens behind <ML>, found {len(found)}"
            )
        for place, (token, allowed) in enumerate(zip(found, self.grammar, strict=False)):
            if token not in allowed:
                expected = self._name[int(allowed[0])]
                if len(allowed) > 1:
                    expected += f" to {self._name[int(allowed[-1])]}"
                name = self._name.get(token, f"token {token}")
                raise LanguageError(f"state token {place} is {name}, expected {expected}")
        level, *changes = (
            int(np.flatnonzero(self.strengths == i)[0]) - MAX_CHANGE for i in found[:10:3]
        )
        return MotionScope(level), CharacterState(**dict(zip(_FIELDS, changes, strict=True)))

    def render(
        self,
        history: Sequence[Turn],
        instruction: Instruction,
        state: GameState | None = None,
    ) -> Rendered:
        """The prompt of one turn: the history, the instruction, the queries and ``<ML>``.

        Args:
            history: the turns in view, oldest first; an opening can only be the first.
            instruction: what is asked now.
            state: the true state, to write it out with labels as in training.

        Raises:
            LanguageError: if the history is malformed.
            InstructionError: if an instruction cannot be written.
        """
        rows = _Rows(self.num_tokens)
        rows.add(np.array([self.bos_id]))
        for t, turn in enumerate(history):
            rows.add(self.text_ids(turn.instruction))
            rows.add(self._block(turn, t), slot=t)
        rows.add(self.text_ids(instruction))
        if state is None:
            rows.add(np.append(self._slots, self._id["<ML>"]), query=len(history))
        else:
            block = self._block(Turn(instruction, state), len(history))
            rows.add(block, query=len(history), labels=len(self._slots) + 1)
        return rows.rendered()

    def render_training(self, turns: Sequence[Turn], supervised: Sequence[bool]) -> Rendered:
        """Packs the prediction of several turns into one sequence.

        Each turn's text is followed by a prediction branch (queries and true state, if the turn is
        supervised) and a history branch (``s_a`` and true state, if a turn follows). Both have the
        same positions and neither sees the other; later turns see the history branch only. Each
        prediction is thus exactly that of ``render(turns[:t], instruction, state)``.

        Args:
            turns: turns in view, oldest first.
            supervised: which of them are predicted; an opening never is.

        Raises:
            LanguageError: if no turn is supervised, an opening is, or the turns are malformed.
        """
        if len(turns) != len(supervised) or not any(supervised):
            raise LanguageError(
                f"{len(turns)} turns with flags {list(supervised)}: expected one flag a turn and "
                "at least one supervised turn"
            )
        last = max(t for t, flag in enumerate(supervised) if flag)
        rows = _Rows(self.num_tokens)
        rows.add(np.array([self.bos_id]))
        for t, turn in enumerate(turns[: last + 1]):
            block = self._block(turn, t)
            rows.add(self.text_ids(turn.instruction))
            if supervised[t]:
                if turn.instruction is None:
                    raise LanguageError(f"turn {t} is an opening, which nothing predicts")
                rows.add(block, query=t, branch=t + 1, labels=len(self._slots) + 1)
            if t < last:
                if supervised[t]:
                    rows.rewind(len(block))
                rows.add(block, slot=t)
        return rows.rendered()

    def _block(self, turn: Turn, t: int) -> Ints:
        """What follows a played turn's text: slots, state, ``</TURN>``."""
        state = turn.state
        if turn.instruction is None:
            if t > 0:
                raise LanguageError(f"history turn {t} has no instruction; only the first may open")
            return np.append(self._slots, self._end_turn)
        if state.motion_scope is None or state.change is None:
            raise LanguageError(
                f"history turn {t} ({turn.instruction}) has no motion scope or state change"
            )
        return np.concatenate([self._slots, self.state_ids(state.motion_scope, state.change)])


class _Rows:
    """Collects the pieces of one sequence."""

    def __init__(self, num_tokens: int) -> None:
        self._marks: Ints = np.full(num_tokens + 2 * len(_OPEN_SLOTS), -1, dtype=np.int64)
        self._marks[len(_OPEN_SLOTS) : -len(_CLOSE_SLOTS)] = np.arange(num_tokens)
        self._num_tokens = num_tokens
        self._position = 0
        self._columns: tuple[list[Ints], ...] = ([], [], [], [], [], [])

    def add(
        self,
        ids: Ints,
        *,
        slot: int | None = None,
        query: int | None = None,
        branch: int = 0,
        labels: int | None = None,
    ) -> None:
        """Adds tokens; ``labels`` is the first one that is predicted."""
        size = len(ids)
        none = np.full(size, -1, dtype=np.int64)
        label = np.full(size, IGNORE, dtype=np.int64)
        if labels is not None:
            label[labels:] = ids[labels:]
        columns = (
            ids.astype(np.int64),
            np.arange(self._position, self._position + size),
            np.full(size, branch, dtype=np.int64),
            none if slot is None else self._mark(size, slot),
            none if query is None else self._mark(size, query),
            label,
        )
        for column, values in zip(self._columns, columns, strict=True):
            column.append(values)
        self._position += size

    def _mark(self, size: int, turn: int) -> Ints:
        marks = np.full(size, -1, dtype=np.int64)
        marks[: len(self._marks)] = np.where(
            self._marks >= 0, self._marks + turn * self._num_tokens, -1
        )
        return marks

    def rewind(self, size: int) -> None:
        """Lets the next piece take the positions of the last ``size`` tokens again."""
        self._position -= size

    def rendered(self) -> Rendered:
        return Rendered(*(np.concatenate(column) for column in self._columns))
