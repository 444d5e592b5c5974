"""Stage 2's data: random-length subsets of games as packed token sequences with features.

Axis letters: B batch, T turns, L sequence, N tokens of s_a, W width of a backbone, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from animegamer.config import DataConfig
from animegamer.data import Shuffle, sample_seed
from animegamer.game import GameState, InstructionError, MotionScope, Turn
from animegamer.language import IGNORE, Language, Rendered
from animegamer.records import Episode, Shot

Features = Mapping[str, Mapping[str, np.ndarray]]
_POOL = 16  # steps whose samples are sorted by length together


@dataclass(frozen=True)
class GameSample:
    """One training subset of a game.

    Attributes:
        shot_ids: the shots in view, oldest first (T).
        rendered: their packed sequence (L).
        f_v: (T, N_v, W_v) float16.
        f_md: (T, N_t, W_t) float16.
    """

    shot_ids: tuple[str, ...]
    rendered: Rendered
    f_v: np.ndarray
    f_md: np.ndarray


@dataclass
class GameBatch:
    """Packed games for stage 2; see ``language.Rendered`` for the token columns.

    The script fills ``s_a`` from ``f_v`` and ``f_md`` with the frozen encoder before the forward
    pass: ``batch.s_a = encoder(batch.f_v.flatten(0, 1), ...).unflatten(0, (B, T))``.

    Attributes:
        ids: (B, L) int64 token ids, right padded with 0.
        position_ids: (B, L) int64, padded with 0.
        branch: (B, L) int64; 0 is seen by all later tokens, k > 0 by branch k only, -1 is padding.
        slot: (B, L) int64, ``t * N + n`` where history ``s_a`` goes in, else -1.
        query: (B, L) int64, ``t * N + n`` where ``s_a`` is predicted, else -1.
        labels: (B, L) int64, ids of the state tokens to predict, else -100.
        turn_mask: (B, T) bool, the turns that are there.
        f_v: (B, T, N_v, W_v) float, zeros where there is no turn; None in play.
        f_md: (B, T, N_t, W_t) float, likewise.
        s_a: (B, T, N, D) float, history and target at once.
        seeds: one a sample, of the noise on its history in training; empty elsewhere.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    branch: torch.Tensor
    slot: torch.Tensor
    query: torch.Tensor
    labels: torch.Tensor
    turn_mask: torch.Tensor
    f_v: torch.Tensor | None = None
    f_md: torch.Tensor | None = None
    s_a: torch.Tensor | None = None
    seeds: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """What the mean loss is taken over, up to a factor: every predicted turn weighs the same.

        Turns have equally many state tokens and queries, so the former count for both.
        """
        return float((self.labels != IGNORE).sum())

    def to(self, device: torch.device | str) -> GameBatch:
        """The batch on another device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v for k, v in own.items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})


class GameDataset:
    """Random-length subsets of games (paper Sec. 3.2), drawn by index.

    ``sample(index)`` depends on the seed and the index alone, for any index from 0 up, so a
    resumed run sees what the unbroken one would have seen. Every turn of every game ends a subset
    once in ``len(self)`` indices. A window counts the turns in view, the current one included; an
    opening counts as a turn in view.

    Args:
        episodes: the games, read without hidden attributes.
        features: ``f_v`` (N_v, W_v) and ``f_md`` (N_t, W_t) float16 by shot id.
        language: renders the turns.
        config: ``min_turns``, ``max_turns``, ``alone_share``, ``sink_share``, ``supervise_first``.
        seed: of the drawing.
        group: samples of a step, over all processes. Above 1, samples of similar length are put
            next to each other within every 16 steps, which saves most of the padding.

    Raises:
        ValueError: if the episodes give nothing to predict, or an instruction does not fit a turn.
        KeyError: if features of a shot are missing.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        features: Features,
        language: Language,
        config: DataConfig,
        seed: int = 0,
        group: int = 1,
    ) -> None:
        self.episodes = episodes
        self.features = features
        self.language = language
        self.config = config
        self.seed = seed
        self.group = group
        shots = [shot for episode in episodes for shot in episode.shots]
        known = set(features)
        missing = [shot.shot_id for shot in shots if shot.shot_id not in known]
        if missing:
            raise KeyError(
                f"features of {len(missing)} of {len(shots)} shots are missing, the first "
                f"{missing[0]!r}: make the features of this split first"
            )
        for shot in shots:
            try:
                language.text_ids(shot.instruction)
            except InstructionError as error:
                raise ValueError(f"shot {shot.shot_id!r}: {error}") from None
        self._ends = [
            (episode, end)
            for episode in range(len(episodes))
            for end in range(len(episodes[episode].shots))
            if self._can_end(episodes[episode].shots, end)
        ]
        if not self._ends:
            raise ValueError(
                f"{len(episodes)} episodes give no turn to predict with max_turns "
                f"{config.max_turns} and supervise_first {config.supervise_first!r}"
            )
        self._order = Shuffle(len(self._ends), seed)
        self._pools: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Indices until every turn has ended a subset once."""
        return len(self._ends)

    def sample(self, index: int) -> GameSample:
        """The subset of an index, with its features."""
        return self._sample(self._position(index))

    def _sample(self, position: int) -> GameSample:
        return sample_of(*self.plan(position), self.features, self.language)

    def batch(self, start: int, size: int) -> GameBatch:
        """The samples ``start`` to ``start + size - 1``, collated."""
        positions = [self._position(index) for index in range(start, start + size)]
        samples = [self._sample(position) for position in positions]
        seeds = tuple(sample_seed(self.seed, position) for position in positions)
        return replace(collate(samples), seeds=seeds)

    def plan(self, position: int) -> tuple[list[Shot], list[bool]]:
        """Which shots are in view, and which of them are predicted, before sorting by length."""
        config = self.config
        episode, end = self._ends[self._order[position]]
        shots = self.episodes[episode].shots
        random = np.random.default_rng((self.seed, 1, position))
        length = int(random.integers(config.min_turns, config.max_turns + 1))
        sink = bool(random.random() < config.sink_share)
        if random.random() < config.alone_share:
            return [shots[end]], [True]
        if sink and length >= 3 and end + 2 - length >= 2:
            view = [0, *range(end + 2 - length, end + 1)]
        else:
            view = list(range(max(0, end + 1 - length), end + 1))
        supervised = self._supervised(shots, view)
        if not any(supervised):  # one turn alone that does not open its game
            view = [end - 1, end]
            supervised = self._supervised(shots, view)
        return [shots[i] for i in view], supervised

    def _supervised(self, shots: Sequence[Shot], view: Sequence[int]) -> list[bool]:
        flags = []
        for place, i in enumerate(view):
            follows = place > 0 and view[place - 1] == i - 1
            explained = follows or (i == 0 and shots[0].turn <= 1)
            flags.append(
                shots[i].instruction is not None
                and (explained or self.config.supervise_first == "always")
            )
        return flags

    def _can_end(self, shots: Sequence[Shot], end: int) -> bool:
        alone = self._supervised(shots, [end])[0]
        return alone or (end > 0 and self.config.max_turns > 1)

    def _position(self, index: int) -> int:
        if self.group == 1:
            return index
        pool, place = divmod(index, self.group * _POOL)
        if pool not in self._pools:
            while len(self._pools) >= 4:
                del self._pools[next(iter(self._pools))]
            self._pools[pool] = self._sort_pool(pool)
        return self._pools[pool][place]

    def _sort_pool(self, pool: int) -> list[int]:
        size = self.group * _POOL
        positions = np.arange(pool * size, (pool + 1) * size)
        lengths = [self._length(*self.plan(int(position))) for position in positions]
        batches = positions[np.argsort(lengths, kind="stable")].reshape(_POOL, self.group)
        random = np.random.default_rng((self.seed, 2, pool))
        return [int(position) for position in random.permutation(batches).reshape(-1)]

    def _length(self, shots: Sequence[Shot], supervised: Sequence[bool]) -> int:
        texts = sum(len(self.language.text_ids(shot.instruction)) for shot in shots)
        return texts + self.language.num_tokens * (len(shots) - 1 + sum(supervised))


def sample_of(
    shots: Sequence[Shot], supervised: Sequence[bool], features: Features, language: Language
) -> GameSample:
    """Consecutive shots of a game, those flagged to be predicted, as a sample.

    Raises:
        LanguageError: if no shot is flagged, or an opening is.
        KeyError: if features of a shot are missing.
    """
    found = [features[shot.shot_id] for shot in shots]
    return GameSample(
        tuple(shot.shot_id for shot in shots),
        language.render_training([_turn(shot) for shot in shots], supervised),
        np.stack([arrays["f_v"] for arrays in found]),
        np.stack([arrays["f_md"] for arrays in found]),
    )


def _turn(shot: Shot) -> Turn:
    if shot.instruction is None:
        return Turn(None, GameState(None, None))
    return Turn(shot.instruction, GameState(MotionScope(shot.motion_level), shot.change))


def collate(samples: Sequence[GameSample]) -> GameBatch:
    """Pads samples on the right into a batch, without ``s_a``."""
    batch = collate_rendered([sample.rendered for sample in samples])
    turns = max(len(sample.f_v) for sample in samples)
    mask = torch.zeros(len(samples), turns, dtype=torch.bool)
    f_v = torch.zeros(len(samples), turns, *samples[0].f_v.shape[1:])
    f_md = torch.zeros(len(samples), turns, *samples[0].f_md.shape[1:])
    for b, sample in enumerate(samples):
        mask[b, : len(sample.f_v)] = True
        f_v[b, : len(sample.f_v)] = torch.from_numpy(sample.f_v)
        f_md[b, : len(sample.f_md)] = torch.from_numpy(sample.f_md)
    return replace(batch, turn_mask=mask, f_v=f_v, f_md=f_md)


def collate_rendered(rendered: Sequence[Rendered]) -> GameBatch:
    """Pads token sequences on the right into a batch without features."""
    padding = {"branch": -1, "slot": -1, "query": -1, "labels": IGNORE}
    shape = (len(rendered), max(len(r) for r in rendered))
    columns = {}
    for name in ("ids", "position_ids", "branch", "slot", "query", "labels"):
        column = np.full(shape, padding.get(name, 0), dtype=np.int64)
        for b, r in enumerate(rendered):
            column[b, : len(r)] = getattr(r, name)
        columns[name] = torch.from_numpy(column)
    return GameBatch(**columns, turn_mask=torch.zeros(len(rendered), 0, dtype=torch.bool))
