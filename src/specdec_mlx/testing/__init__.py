"""Conformance tests for anybody's drafter, rule and rollback strategy."""

from specdec_mlx.testing.drafter import check_drafter as check_drafter
from specdec_mlx.testing.rule import check_rule as check_rule
from specdec_mlx.testing.strategy import check_strategy as check_strategy
