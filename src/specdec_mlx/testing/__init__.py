"""Conformance tests for anybody's drafter, rule and rollback strategy."""

from specdec_mlx.testing.conformance import check_drafter as check_drafter
