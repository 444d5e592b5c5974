"""Draws played games: turn_01.mp4 ... beside game.json, and the story at a glance, storyboard.png.

python inference_MLLM.py         plays game_demo/demo.txt first
python inference_Decoder.py      then draws that game with checkpoints/tiny
python inference_Decoder.py sampling.steps=20 play.upscale=8
"""

import argparse
import sys
from pathlib import Path

from animegamer import config as configuration


def draw(config: configuration.Config) -> None:
    """Draws the games of ``play.scripts`` that lie in ``play.output``."""
    from tqdm import tqdm

    from animegamer.saved_game import STORYBOARD_FILE, SavedGame, folders
    from animegamer.storyboard import story_frames, storyboard
    from animegamer.vocabulary import Vocabulary

    outputs = folders(config.play.output, config.play.scripts)
    games = [SavedGame.read(folder) for folder in outputs]
    from animegamer.drawing import ShotDrawer  # torch: after the files' own mistakes

    drawer = ShotDrawer.load(config)
    vocabulary = Vocabulary.read(Path(config.play.checkpoint) / "vocabulary.json")
    with tqdm(total=sum(len(game.turns) for game in games), unit="shot") as bar:
        for game in games:
            shots = drawer.draw_each(game.s_a_hat, game.scopes, game.seeds)
            glimpses = []
            for turn, shot in enumerate(shots, 1):
                game.write_shot(turn, shot, config.play.upscale)
                glimpses.append(story_frames(shot))
                bar.update()
            storyboard(game, glimpses, vocabulary).save(game.folder / STORYBOARD_FILE)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and draws; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--config", default="configs/tiny/play.yaml", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as play.upscale=8")
    options = parser.parse_intermixed_args(arguments)
    from animegamer.saved_game import PLAYER_ERRORS

    try:
        draw(configuration.load(options.config, options.overrides))
    except (KeyboardInterrupt, *PLAYER_ERRORS) as error:
        print(f"inference_Decoder.py: {str(error) or 'stopped'}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
