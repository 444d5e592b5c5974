"""The built-in world: a small animated film world that we draw ourselves."""
