"""Is it really the target's own text? A check of models and machines, and tests of contracts."""

from specdec_mlx.lab.proof.report import CheckReport as CheckReport
from specdec_mlx.lab.proof.report import Part as Part
from specdec_mlx.lab.proof.run import check as check
