"""Drafters that learn on while a command runs (`--online`), and are saved when it ends."""

from __future__ import annotations

import atexit
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.draft_models import Lighter
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.training.online import OnlineDrafter, OnlineDraftModel, learning_on, stored_plan


class Learner:
    """The learning drafter of a folder, a trained head or a draft model, for a target at a time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._target: nn.Module | None = None
        self._latest: OnlineDrafter | None = None
        atexit.register(self.save)

    def drafter(self, target: nn.Module, spec: str) -> OnlineDrafter:
        """The drafter for a target, with a draft model's options; raises as `learning_on`."""
        if self._latest is None or self._target is not target:
            self.save()
            self._latest, self._target = learning_on(self.folder, target), target
        latest = self._latest
        if not isinstance(latest, OnlineDraftModel):
            return latest
        tokenizer = latest.drafter.tokenizer
        chosen = make_drafter(spec, draft_model=latest.model, draft_tokenizer=tokenizer)
        assert isinstance(chosen, ModelDrafter)
        return latest.drafting_as(chosen)

    def save(self) -> None:
        """Write what was learned, if anything was."""
        if self._latest is not None:
            self._latest.save()


def check_learns(draft_model: str | None, lighter: Lighter) -> None:
    """Raise ValueError, before anything is loaded, for what `--online` cannot be given with."""
    if draft_model is None:
        raise ValueError(
            "argument --online: expected --draft-model, a head or a draft model that "
            "`specdec-mlx train` made, to learn."
        )
    if lighter.flags:
        raise ValueError(
            f"argument --online: {', '.join(lighter.flags)} drafts with another model than the one "
            "that learns and is saved. Leave one of them out."
        )
    if mx.distributed.init().size() > 1:
        raise ValueError(
            "argument --online: a target that is spread over ranks cannot be learnt from, since "
            "all of them would have to learn alike. Leave it out, or use one machine."
        )
    stored_plan(Path(draft_model).expanduser())
