"""Housekeeping of a store: what may go (`outrider sync gc`), what is damaged and can be healed (`verify`)."""
