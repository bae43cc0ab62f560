"""`python -m specdec_mlx.server` is `specdec-mlx server`."""

import sys

from specdec_mlx.cli.signals import end_in_peace

end_in_peace()  # before the imports below, which take a while

from specdec_mlx.errors import MissingBackendError  # noqa: E402
from specdec_mlx.server.command import run  # noqa: E402

try:
    run(sys.argv[1:])
except (ValueError, RuntimeError, OSError, MissingBackendError) as error:
    print(f"specdec-mlx: {error}", file=sys.stderr)
    raise SystemExit(2) from None
