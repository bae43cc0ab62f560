"""The check as a whole: its parts in turn, each with a share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.arguments import check_int
from specdec_mlx.contracts import AcceptanceRule, all_drafters, models_of
from specdec_mlx.draft_length.value import make_draft_length
from specdec_mlx.drafters.choosing.choice import AnyDrafter, resolve
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.errors import CacheRollbackError, DraftError, LogitsError
from specdec_mlx.lab.probing import ProbeReport
from specdec_mlx.lab.prompts import encode_chat, read_prompts
from specdec_mlx.lab.proof import distributions, one_step
from specdec_mlx.lab.proof import texts as texts_of_parts
from specdec_mlx.lab.proof.chi_square import scipy
from specdec_mlx.lab.proof.report import CheckReport, Finding, Part
from specdec_mlx.lab.proof.subject import Place, Subject, Work
from specdec_mlx.models.anatomy import group_of, vocab_size_of
from specdec_mlx.progress import progress_bar
from specdec_mlx.ranks import Ranks
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import Sampler, Sampling, read_sampler

BUDGET = 300.0
PROMPTS = ("chat/3", "rewriting/3", "code_edit/3", "code/0")
"""Short ones of our own: a prompt costs a prefill of each model, several times over."""

ONE_STEP, JOINT, DECLARED = (f"{what} distribution" for what in ("one-step", "joint", "declared"))
"""Parts about what is drawn."""


def check(
    model: nn.Module,
    tokenizer: Any,
    *,
    drafter: AnyDrafter = DEFAULT_DRAFTER,
    draft_model: nn.Module | str | None = None,
    sampler: Sampler | Sampling | None = None,
    rule: str | AcceptanceRule = "auto",
    ties: str | None = None,
    num_draft_tokens: int | str = "auto",
    prompts: Sequence[str | Sequence[int]] | None = None,
    budget: float = BUDGET,
    texts: int | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> CheckReport:
    """Prove on this model, machine and setting that speculation leaves the text unchanged.

    Args:
        model: the target.
        tokenizer: the target's. May be None if prompts are token ids.
        drafter: see `generate`.
        draft_model: see `generate`.
        sampler: how the target's tokens are drawn, a `Sampling` or one of mlx-lm's samplers. None
            is greedy.
        rule: see `speculate`.
        ties: of the greedy texts that are compared (see `Options`).
        num_draft_tokens: see `speculate`. Where drafters work outside of the loop, "auto" has no
            measurements and means 4 tokens.
        prompts: user messages, or token ids. None takes a few of the built-in prompts.
        budget: seconds. Each part takes as many samples as fit. A part without time is "not run",
            and then the check has not passed.
        texts: upper limit on texts for the joint distribution. None means 6,000. More texts find a
            smaller bias, if the budget suffices.
        seed: of all draws. With a seed, rule "auto" is the coupled rule, as in `generate`.
        progress: show a bar.

    Returns:
        The parts. docs/check.md says how to read them.

    Raises:
        ValueError: for bad input, or a sampler whose distribution is not known.
        UnknownNameError: no drafter or rule has this name.
        TokenizerMismatchError: the draft model has another tokenizer.
        MissingPackageError: scipy is not installed, and the sampler draws at random.
    """
    if not budget > 0:
        raise ValueError(f"budget={budget}: expected a number of seconds above 0.")
    if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    chosen = resolve(drafter, draft_model, model, tokenizer)
    if chosen is None:
        raise ValueError("There is nothing to check without a drafter. Give drafter=.")
    sampling = read_sampler(sampler)
    if sampling is None:
        raise ValueError(
            "The distribution of this sampler is not known, so there is nothing to compare with. "
            "Give a specdec_mlx.Sampling(...) or a sampler of mlx_lm's make_sampler."
        )
    if not isinstance(num_draft_tokens, str):
        check_int("num_draft_tokens", num_draft_tokens, 1)
    make_draft_length(num_draft_tokens)
    if texts is not None:
        check_int("texts", texts, 1)
    # Fail before the long part if the statistics cannot be computed.
    if not sampling.greedy:
        scipy()
    subject = Subject(
        model=model,
        drafter=chosen,
        sampling=sampling,
        rule=make_rule(rule, is_seeded=seed is not None),
        prompts=_encoded(tokenizer, prompts),
        vocab_size=vocab_size_of(model),
        num_draft_tokens=num_draft_tokens,
        seed=seed or 0,
        tokenizer=tokenizer,
        end_tokens=getattr(tokenizer, "eos_token_ids", ()),
        ties=ties,
    )
    with wired_limit([model, *models_of(subject.drafter)], [generation_stream]):
        group = group_of(model)
        ranks = None if group is None else Ranks(group, generation_stream)
        work = Work(time.perf_counter() + budget, ranks=ranks)
        parts = run_parts(subject, work, progress, texts)
    settings = {
        "drafter": type(chosen).__name__,
        **{k: v for k, v in vars(sampling).items() if k == "temp" or v != getattr(Sampling, k)},
        "rule": subject.rule.name,
        "num_draft_tokens": num_draft_tokens,
        "prompts": len(subject.prompts),
        "budget": budget,
        "seed": subject.seed,
        "device": "GPU" if mx.default_device() == mx.gpu else "CPU",
        **({} if ranks is None else {"ranks": ranks.group.size()}),
    }
    return CheckReport(parts, settings)


def _encoded(tokenizer: Any, prompts: Sequence[str | Sequence[int]] | None) -> list[list[int]]:
    if prompts is None:
        prompts = [prompt.text for prompt in read_prompts() if prompt.id in PROMPTS]
    encoded = [encode_chat(tokenizer, p) if isinstance(p, str) else list(p) for p in prompts]
    if not encoded or not all(encoded):
        raise ValueError("There is no prompt, or an empty one. Give at least one token in each.")
    return encoded


def run_parts(subject: Subject, work: Work, progress: bool, most: int | None = None) -> list[Part]:
    """Run the parts in order, within the time for all. Later parts use data of earlier parts."""
    steps: list[Place] = []
    draws = distributions.Draws()
    probed: list[ProbeReport] = []
    # part -> its share of the remaining time, and its function
    parts: dict[str, tuple[float, Callable[[Work], Finding]]] = {
        "widths": (0.5, lambda work: texts_of_parts.check_widths(subject.model, work, probed)),
        ONE_STEP: (0.2, lambda work: one_step.check_one_step(subject, work, steps)),
        JOINT: (0.5, lambda work: distributions.check_joint(subject, work, steps, draws, most)),
        DECLARED: (1.0, lambda work: distributions.check_declared(draws)),
        "drafter's state": (0.4, partial(texts_of_parts.check_state, subject)),
    }
    # Only heads have other readings of their files.
    for part in all_drafters(subject.drafter):
        if isinstance(part, HeadDrafter):
            variations = partial(texts_of_parts.check_variations, subject, part)
            parts.setdefault("head's variants", (0.5, variations))
    parts["greedy text"] = (1.0, lambda work: texts_of_parts.check_greedy(subject, work, *probed))
    done = []
    bar_format = "{desc}: part {n_fmt} of {total_fmt} |{bar:20}| {elapsed}{postfix}"
    with progress_bar(
        total=len(parts), bar_format=bar_format, miniters=0, mininterval=0.5, disable=not progress
    ) as bar:

        def say(num_samples: int) -> None:
            bar.set_postfix_str(f"{num_samples} samples", refresh=False)
            bar.update(0)

        for name, (share, check_part) in parts.items():
            bar.set_description_str(name)
            started = time.perf_counter()
            if subject.sampling.greedy and name in (ONE_STEP, JOINT, DECLARED):
                verdict = "Nothing is drawn at temperature 0, where the greedy text says it all."
                answer = Finding("not applicable", verdict, {})
            elif name != DECLARED and not work.has_time():
                verdict = "There was no time left. Give more (--budget)."
                answer = Finding("not run", verdict, {})
            else:
                try:
                    answer = check_part(work.share(share, say))
                except (DraftError, LogitsError, CacheRollbackError) as error:
                    answer = Finding("failed", str(error), {})
            done.append(Part(name, *answer, time.perf_counter() - started))
            bar.update()
    return done
