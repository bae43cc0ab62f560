"""Is it really the target's own text? A check that users run on their own models and machine."""

from specdec_mlx.checks.report import CheckReport as CheckReport
from specdec_mlx.checks.report import Part as Part
from specdec_mlx.checks.run import check as check
