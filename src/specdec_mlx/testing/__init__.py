"""Conformance tests for anybody's drafter, rule and rollback strategy, one call each.

from specdec_mlx.testing import check_drafter

def test_my_drafter_keeps_the_contract():
    check_drafter(MyDrafter())
"""

from specdec_mlx.testing.drafter import check_drafter as check_drafter
from specdec_mlx.testing.rule import check_rule as check_rule
from specdec_mlx.testing.strategy import check_strategy as check_strategy
