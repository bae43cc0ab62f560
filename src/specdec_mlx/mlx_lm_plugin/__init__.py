"""mlx-lm's own calls and commands, with any drafter."""

from specdec_mlx.mlx_lm_plugin.commands import run_command as run_command
from specdec_mlx.mlx_lm_plugin.installation import (
    MlxLmVersionError as MlxLmVersionError,
)
from specdec_mlx.mlx_lm_plugin.installation import Speculation as Speculation
from specdec_mlx.mlx_lm_plugin.installation import install as install
from specdec_mlx.mlx_lm_plugin.installation import installed as installed
from specdec_mlx.mlx_lm_plugin.installation import uninstall as uninstall
