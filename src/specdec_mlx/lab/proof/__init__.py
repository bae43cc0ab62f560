"""Is it really the target's own text? A check that users run on their own models and machine."""

from specdec_mlx.lab.proof.report import CheckReport as CheckReport
from specdec_mlx.lab.proof.report import Part as Part
from specdec_mlx.lab.proof.run import check as check
