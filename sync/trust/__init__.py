"""Who may say what a node serves: TUF metadata, one key per role. `rules` is pure, the other files do the I/O."""
