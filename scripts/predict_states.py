"""Caches the MLLM's predictions ``s_a_hat`` of every shot, which stage 3 adapts the decoder to.

The history is the true one, or by ``data.prediction_history: own`` what the MLLM itself predicted.
The encoder's output for zero features, which guidance needs, is cached beside them.

    python scripts/predict_states.py --config configs/tiny/stage3.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from animegamer.features import FeatureStore, FeatureWriter
    from animegamer.models.state_model import StateModel
    from animegamer.records import Episode

BATCH = 64


def on_true_history(
    model: StateModel,
    store: FeatureStore,
    episodes: list[Episode],
    writer: FeatureWriter,
    window: int,
    sink: int,
) -> None:
    """Predicts every turn from the turns that were really before it."""
    from tqdm import tqdm

    from animegamer.game import visible_turns
    from animegamer.game_data import collate, sample_of

    content = f"true {window} {sink}"

    views = [
        [*visible_turns(episode.shots[:place], window, sink), shot]
        for episode in episodes
        for place, shot in enumerate(episode.shots)
        if shot.turn > 0 and not writer.has(shot.shot_id, content)
    ]
    views.sort(key=len)
    device = next(model.parameters()).device
    for start in tqdm(range(0, len(views), BATCH), desc="predict", unit="batch"):
        part = views[start : start + BATCH]
        samples = [
            sample_of(view, [False] * (len(view) - 1) + [True], store, model.mllm.language)
            for view in part
        ]
        batch = model.fill(collate(samples).to(device))
        predicted = model.mllm.predict_packed(batch).half().cpu().numpy()
        for view, row in zip(part, predicted, strict=True):
            writer.add(view[-1].shot_id, content, {"s_a_hat": row[len(view) - 1]})


def on_own_history(
    model: StateModel,
    store: FeatureStore,
    episodes: list[Episode],
    writer: FeatureWriter,
    window: int,
    sink: int,
) -> None:
    """Plays the games: each turn sees what the MLLM predicted before, true only for an opening."""
    import torch
    from tqdm import tqdm

    from animegamer.game import GameState, Turn, visible_turns

    content = f"own {window} {sink}"
    episodes = [
        episode
        for episode in episodes
        if not all(writer.has(s.shot_id, content) for s in episode.shots if s.turn > 0)
    ]
    device = next(model.parameters()).device
    for start in tqdm(range(0, len(episodes), BATCH), desc="play", unit="batch"):
        games = episodes[start : start + BATCH]
        turns: list[list[Turn]] = [[] for _ in games]
        for place in range(max(len(game.shots) for game in games)):
            active = [i for i, game in enumerate(games) if place < len(game.shots)]
            asked = [i for i in active if games[i].shots[place].turn > 0]
            for i in set(active) - set(asked):
                arrays = store[games[i].shots[place].shot_id]
                f_v, f_md = (torch.from_numpy(arrays[k]).float() for k in ("f_v", "f_md"))
                s_a = model.encoder(f_v[None].to(device), f_md[None].to(device))[0]
                turns[i].append(Turn(None, GameState(None, None, s_a.float().cpu().numpy())))
            if not asked:
                continue
            instructions = [games[i].shots[place].instruction for i in asked]
            views = [visible_turns(turns[i], window, sink) for i in asked]
            found = model.mllm.predict(views, instructions)
            for row, i in enumerate(asked):
                s_a_hat = found.s_a_hat[row].float().cpu().numpy()
                state = GameState(found.motion_scopes[row], found.changes[row], s_a_hat)
                turns[i].append(Turn(instructions[row], state))
                shot_id = games[i].shots[place].shot_id
                writer.add(shot_id, content, {"s_a_hat": s_a_hat.astype("float16")})


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/stage3.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    import torch
    from safetensors.torch import save

    from animegamer import config as configuration
    from animegamer.atomic import write_bytes
    from animegamer.checkpoint import exported, fingerprint, load_model
    from animegamer.features import FeatureStore, FeatureWriter
    from animegamer.models.encoder import ActionAwareEncoder
    from animegamer.models.mllm import NextStateMLLM
    from animegamer.models.state_model import StateModel
    from animegamer.parallel import LaunchError, process_count
    from animegamer.records import read_episodes
    from data_pipeline.features import feature_source

    if process_count() > 1:
        raise LaunchError(f"{process_count()} processes would write the same file: start one")
    config = configuration.load(options.config, options.overrides)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    if config.train.init is None:
        raise configuration.ConfigError("stage 3 needs train.init: the run of stage 1")
    weights, mllm = exported(config.train.init) / "encoder", exported(config.data.mllm) / "mllm"
    encoder = load_model(ActionAwareEncoder, weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = device == "cuda" and config.train.precision == "bf16"  # 7B: 14 GB instead of 29
    loaded = NextStateMLLM.from_pretrained(mllm, dtype=torch.bfloat16 if half else torch.float32)
    model = StateModel(encoder, loaded).eval().to(device)
    store = FeatureStore(config.data.features, feature_source(config.backbones))
    source = {"encoder": fingerprint(weights), "mllm": fingerprint(mllm)}
    writer = FeatureWriter(config.data.predictions, source)
    own = config.data.prediction_history == "own"
    with torch.no_grad():
        for directory in (config.data.train, config.data.validation):
            episodes = read_episodes(Path(directory) / "shots.jsonl")
            predict = on_own_history if own else on_true_history
            predict(model, store, episodes, writer, config.play.window, config.play.sink)
        writer.flush()
        null = model.encoder.null().float().cpu().contiguous()
    write_bytes(Path(config.data.predictions) / "null.safetensors", save({"s_a_null": null}))


if __name__ == "__main__":
    main()
