"""The drafter that learns with `--online`: a trained head or a draft model."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import name_in
from specdec_mlx.drafters.choosing import registry
from specdec_mlx.drafters.choosing.choice import DraftModel
from specdec_mlx.drafters.choosing.registry import MODEL_DRAFTER
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.lab.training.online import learning_on, stored_plan


class Learner:
    """The trained head or draft model that learns with `--online`, for one target at a time."""

    def __init__(self, model: DraftModel) -> None:
        self.folder = str(model.name)
        self._latest: Any = None
        atexit.register(self.save)

    def drafter(self, target: Any, spec: str) -> Any:
        """The drafter of a spec for a target.

        Raises ValueError for options, and the errors of `learning_on`.
        """
        if name_in(spec) != MODEL_DRAFTER:
            return registry.make_drafter(spec, draft_model=self.drafter(target, MODEL_DRAFTER))
        if spec != MODEL_DRAFTER and is_head(self.folder):
            raise ValueError(f"Drafter {spec!r}: with --online a trained head takes no options.")
        # Another target means other states to learn from, so learning begins anew.
        if self._latest is None or self._latest.trainer.target is not target:
            self.save()
            self._latest = learning_on(self.folder, target)
        latest = self._latest
        if is_head(self.folder):
            return latest
        pair = {"draft_model": latest.model, "draft_tokenizer": latest.drafter.tokenizer}
        chosen: Any = registry.make_drafter(spec, **pair)
        return latest.drafting_as(chosen)

    def save(self) -> None:
        """Save the weights if they have changed."""
        if self._latest is not None:
            self._latest.save()

    @staticmethod
    def check(model: DraftModel) -> None:
        """Raise ValueError if `--online` cannot be used with these flags. Loads no model."""
        fault = ""
        if model.name is None:
            fault = "expected --draft-model, a head or a draft model that `specdec-mlx train` made."
        elif model.flags:
            others = ", ".join(model.flags)
            fault = f"{others} drafts with another model than the one that learns. Leave one out."
        elif mx.distributed.init().size() > 1:
            fault = "a target that is spread over ranks cannot be learnt from. Use one machine."
        if fault:
            raise ValueError(f"argument --online: {fault}")
        stored_plan(Path(str(model.name)).expanduser())
