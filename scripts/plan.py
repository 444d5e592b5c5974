"""Counts parameters and plans memory, without weights and without a GPU.

The stage follows from what the configuration trains, the layout from its ``plan`` section:

    python scripts/plan.py --config configs/full/stage2.yaml
    python scripts/plan.py --config configs/full/stage2.yaml plan.layout=fsdp plan.devices=16
    python scripts/plan.py --config configs/full/stage1_joint.yaml train.batch_size=4
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/full/stage2.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as plan.layout=fsdp"
    )
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        config = configuration.load(options.config, options.overrides)
        from animegamer.plan import report

        print(report(config))
    except (OSError, ValueError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
