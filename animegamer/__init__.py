"""AnimeGamer: infinite anime life simulation with next game state prediction (arXiv 2504.01014)."""

__version__ = "0.1.0"
