"""Training of the tiny backbones, which take the place of downloaded weights at tiny scale."""
