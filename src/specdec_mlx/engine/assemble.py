"""How a generation is put together, of one text, of a text of a batch, or of a recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn

from specdec_mlx.contracts import DraftContext, Drafter, DraftLength, Target
from specdec_mlx.draft_length.policy import make_draft_length
from specdec_mlx.draft_length.store import tuning_for
from specdec_mlx.engine.drafting import Drafting
from specdec_mlx.engine.options import Options
from specdec_mlx.engine.ranks import Ranks, SharedDrafting, shared_noise
from specdec_mlx.engine.sequence import SequenceState
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.verify.inputs import (
    check_drafter_fits,
    check_ids,
    check_prompt,
    max_tokens_of,
)
from specdec_mlx.verify.next_token import NextToken
from specdec_mlx.verify.rollback import Rollback
from specdec_mlx.verify.verifier import Verifier


@dataclass
class Assembled:
    """The parts of a generation.

    target: a `Verifier`, or what else stands for one. context: what the drafter knows of it.
    """

    target: Any
    sequence: SequenceState
    drafting: Drafting
    stats: SpeculationStats
    context: DraftContext


def assemble(
    model: nn.Module,
    prompt_tokens: Any,
    drafter: Drafter | None,
    options: Options,
    caches: list[Any],
    *,
    draft_cache: list[Any] | None = None,
    ranks: Ranks | None = None,
    length: DraftLength | None = None,
    num_read: int = 0,
    num_said: int = 0,
    history: Sequence[int] = (),
    stats: SpeculationStats | None = None,
    of_batch: dict[str, Any] | None = None,
) -> Assembled:
    """Put a generation together, and check all that it is made of.

    Args:
        caches: the target's, which hold the prompt's first `num_read` tokens.
        draft_cache: a draft model's, kept by the caller.
        ranks: the ranks that the model is spread over.
        length: a draft length in the place of the options' own.
        num_said: the prompt's last tokens that are the text's beginning, written elsewhere.
        history: [n] tokens that the caches hold before the prompt.
        stats: an account to go on with.
        of_batch: fields of the drafter's context that differ where passes are shared.

    Raises:
        PromptError: for what cannot be a prompt of this model.
        ValueError: for other bad input.
    """
    prompt = check_prompt(prompt_tokens, options.input_embeddings, drafter)
    prompt, num_read = [*history, *prompt], num_read + len(history)
    target = verifier_for(
        model,
        Rollback(caches, num_read),
        options,
        probe=options.probe and drafter is not None,
        noise=shared_noise(ranks, options.seed),
    )
    check_ids(prompt, target.vocab_size())
    context = target.draft_context(options.tokenizer, draft_cache)
    context = replace(context, **{"num_unseen": len(history)} | (of_batch or {}))
    check_drafter_fits(drafter, context)
    if length is None:
        tuning = tuning_for(model) if options.tuning is None else options.tuning
        length = make_draft_length(options.draft_length, tuning)
    parts = assemble_around(
        target,
        prompt,
        drafter,
        length,
        options,
        context,
        ranks=ranks,
        num_said=num_said,
    )
    parts.sequence.has_prompt = len(prompt_tokens) > 0
    parts.sequence.num_history = len(history)
    parts.drafting.keeps_cache = options.prompt_cache is not None
    parts.stats = SpeculationStats() if stats is None else stats
    return parts


def assemble_around(
    target: Target,
    prompt: list[int],
    drafter: Drafter | None,
    length: DraftLength,
    options: Options,
    context: DraftContext,
    *,
    ranks: Ranks | None = None,
    num_said: int = 0,
) -> Assembled:
    """Put a generation together around a target that is there; arguments as of `assemble`."""
    sequence = SequenceState(
        prompt,
        len(prompt) - num_said,
        max_tokens_of(options.max_tokens),
        options.input_embeddings,
        num_said,
    )
    how: dict[str, Any] = {"keeps_cache": False, "stream": options.stream}
    drafting = (
        Drafting(drafter, length, target, sequence, **how)
        if ranks is None
        else SharedDrafting(ranks, drafter, length, target, sequence, **how)
    )
    return Assembled(target, sequence, drafting, SpeculationStats(), context)


def verifier_for(
    model: nn.Module,
    rollback: Rollback,
    options: Options,
    *,
    probe: bool,
    noise: Noise,
) -> Verifier:
    """The target of a generation: a model with caches, what tokens are drawn from, a rule."""
    next_token = NextToken(
        options.sampler or Sampling(), options.logits_processors or (), noise
    )
    return Verifier(
        model,
        rollback,
        options,
        next_token=next_token,
        given_rule=options.rule,
        end_tokens=frozenset(getattr(options.tokenizer, "eos_token_ids", None) or ()),
        probe=probe,
    )
