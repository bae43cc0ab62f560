"""`python -m specdec_mlx` is the command line."""

from specdec_mlx.cli import main

raise SystemExit(main())
