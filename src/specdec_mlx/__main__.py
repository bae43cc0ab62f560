"""`python -m specdec_mlx` is the command line."""

from specdec_mlx.cli.commands import run_process

raise SystemExit(run_process())
