"""mlx-lm's own calls and commands, with any drafter."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.mlx_lm_plugin.commands import run_command as run_command
    from specdec_mlx.mlx_lm_plugin.installation import Speculation as Speculation
    from specdec_mlx.mlx_lm_plugin.installation import install as install
    from specdec_mlx.mlx_lm_plugin.installation import patched as patched
    from specdec_mlx.mlx_lm_plugin.installation import uninstall as uninstall

_INSTALLATION = "Speculation", "install", "patched", "uninstall"


def __getattr__(name: str) -> Any:
    # Flags are read without MLX, so that each module is imported at its first use.
    if name == "run_command":
        return _import_module("specdec_mlx.mlx_lm_plugin.commands").run_command
    if name in _INSTALLATION:
        return getattr(_import_module("specdec_mlx.mlx_lm_plugin.installation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
