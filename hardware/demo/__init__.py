"""Models to try the system on, made from what packages already hold: no downloads."""
