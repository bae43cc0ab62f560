"""Experiments, run from a checkout as `python -m benchmarks.NAME`; README.md lists them."""
