"""mlx-lm's own calls and commands, with any drafter."""

from specdec_mlx.mlx_lm_plugin.commands import run_command as run_command
from specdec_mlx.mlx_lm_plugin.compatible import MlxLmVersionError as MlxLmVersionError
from specdec_mlx.mlx_lm_plugin.install import Speculation as Speculation
from specdec_mlx.mlx_lm_plugin.install import install as install
from specdec_mlx.mlx_lm_plugin.install import installed as installed
from specdec_mlx.mlx_lm_plugin.install import uninstall as uninstall
