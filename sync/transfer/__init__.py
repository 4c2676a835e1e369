"""Releases in one file, for stores that no network reaches: from one store, verified and taken in by another."""
