"""HTML views and plots of what `stats` counted; importing it gives the account its `plot()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_mlx.notebook.views import stats_html
from specdec_mlx.stats.account import SpeculationStats

if TYPE_CHECKING:
    from specdec_mlx.notebook.canvas import Plot


class NotebookView:
    """How notebooks show an account."""

    def html(self, stats: SpeculationStats) -> str:
        """Compact table."""
        return stats_html(stats)

    def figure(self, stats: SpeculationStats) -> Plot:
        """Three panels; matplotlib is an optional package, and imported only here."""
        from specdec_mlx.notebook.plots import plot_stats

        return plot_stats(stats)


SpeculationStats.view = NotebookView()
