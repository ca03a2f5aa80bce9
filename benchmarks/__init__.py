"""Longspool against its peers, side by side in one run. `python benchmarks/run.py --help` says how."""
