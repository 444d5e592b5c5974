"""Plays instruction files: game states to game.json, representations to s_a_hat.safetensors.

python inference_MLLM.py         plays game_demo/demo.txt with checkpoints/tiny
python inference_MLLM.py 'play.scripts=[game_demo/demo_ja.txt]' play.output=results/ja
python inference_Decoder.py      then draws the same game; files: see game_demo/README.md
"""

import argparse
import sys
from functools import partial
from itertools import chain

from animegamer import config as configuration


def play(config: configuration.Config) -> None:
    """Plays ``play.scripts`` as one batch and writes what was played, also when interrupted."""
    from tqdm import tqdm

    from animegamer.game import read_script
    from animegamer.saved_game import SavedGame, folders

    paths, outputs = config.play.scripts, folders(config.play.output, config.play.scripts)
    scripts = [read_script(path) for path in paths]
    from animegamer.session import GameSession  # torch: after the scripts' own mistakes

    session = GameSession.load(config, draw=config.play.history == "reencoded")
    asked = [script.instructions for script in scripts]
    openings = [config.play.opening or script.opening for script in scripts]
    print(session.vocabulary.note(chain(*asked)), end="", file=sys.stderr)
    games = [session.new_game(opening) for opening in openings]
    saved = list(map(partial(SavedGame.begin, session.config), outputs, paths, openings))
    try:
        turns = tqdm(session.play(games, asked), total=sum(map(len, asked)), unit="turn")
        for i, instruction, state in turns:
            saved[i].add(instruction, state, session.meters_of(games[i], instruction))
    finally:
        for record in saved:
            record.write()


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and plays; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--config", default="configs/tiny/play.yaml", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as play.window=1")
    options = parser.parse_intermixed_args(arguments)
    from animegamer.saved_game import PLAYER_ERRORS  # not for --help

    try:
        play(configuration.load(options.config, options.overrides))
    except (KeyboardInterrupt, *PLAYER_ERRORS) as error:
        print(f"inference_MLLM.py: {str(error) or 'stopped'}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
