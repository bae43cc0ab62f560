"""Where mlx-vlm is not installed."""

from __future__ import annotations

import sys

import pytest

import specdec_mlx as sd
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.vision.model import mlx_vlm


def test_without_mlx_vlm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    mlx_vlm.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install 'specdec-mlx\[vision\]'"):
        sd.vision.load("a/model")
