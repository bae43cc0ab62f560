"""`python -m specdec_mlx.server` is `specdec-mlx server`."""

import sys

from specdec_mlx.errors import MissingBackendError
from specdec_mlx.server.command import run

try:
    run(sys.argv[1:])
except (ValueError, RuntimeError, OSError, MissingBackendError) as error:
    print(f"specdec-mlx: {error}", file=sys.stderr)
    raise SystemExit(2) from None
