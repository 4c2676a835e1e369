"""What Outrider costs, measured against what it stands on, in the same run. `python -m benchmarks` runs them all."""
