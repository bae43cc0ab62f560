"""Do packages that speculate on MLX keep the target's own text? Asked of each in the same way.

    python -m benchmarks.conformance FOLDER [--peer NAME ...] [--page docs/conformance.md]

Each package is installed in an environment of its own under FOLDER, in the newest version from
PyPI, and called through its public functions on tiny models with random weights. `questions` has
the questions, `peers` the calls, and `failures` a short script for each failure.
"""
