"""`python -m specdec_mlx` is the command line."""

from specdec_mlx.cli.commands import main

raise SystemExit(main())
