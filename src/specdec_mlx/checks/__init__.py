"""Is it really the target's own text? A check that users run on their own models and machine.

Its questions: passes over several positions, greedy texts and how a head was read (`texts`), the
exact distribution of one step (`one_step`), the joint one of a few tokens (`joint`), those that
drafters declare (`declared`), and whether the drafter is in step with the text (`state`).
"""

from specdec_mlx.checks.report import CheckReport as CheckReport
from specdec_mlx.checks.report import Part as Part
from specdec_mlx.checks.run import check as check
