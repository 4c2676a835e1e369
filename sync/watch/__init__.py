"""Checkpoints that a trainer leaves in a folder or a bucket, found when they are whole."""
