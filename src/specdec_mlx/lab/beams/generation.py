"""A prompt in, its likeliest continuations out: beam search with a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.arguments import check_int
from specdec_mlx.contracts import (
    DraftContext,
    all_drafters,
)
from specdec_mlx.drafters.choosing.choice import AnyDrafter, resolve
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.errors import UnreadableError
from specdec_mlx.generation import Prompt, encode, loaded
from specdec_mlx.lab.beams.search import Beam, BeamDrafting, BeamRows, BeamSearch, guess_length_for
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.sampling import Sampling
from specdec_mlx.sequence import check_ids, check_prompt


@dataclass
class BeamText:
    """One continuation of the prompt.

    Attributes:
        text: without a stop token.
        tokens: ids with the stop token.
        logprob: sum of the tokens' log-probabilities.
        score: number by which the beams are ranked.
        finish_reason: "stop" or "length".
    """

    text: str
    tokens: list[int]
    logprob: float
    score: float
    finish_reason: str


@dataclass
class BeamSearchResponse:
    """Result of a beam search.

    Attributes:
        beams: the best first.
        prompt_tokens: length of the prompt.
        num_passes: passes of the model after the prompt.
        num_steps: steps of the search, which are the passes that it takes without drafts.
    """

    beams: list[BeamText]
    prompt_tokens: int
    num_passes: int
    num_steps: int

    @property
    def text(self) -> str:
        """Text of the best beam."""
        return self.beams[0].text


def beam_search(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    num_beams: int = 4,
    max_tokens: int = 128,
    drafter: AnyDrafter = DEFAULT_DRAFTER,
    draft_model: nn.Module | str | None = None,
    num_draft_tokens: int | str = "auto",
    length_penalty: float = 0.0,
    prefill_step_size: int = 2048,
    stream: Any = generation_stream,
) -> BeamSearchResponse:
    """Search for the likeliest continuations of a prompt, with several steps in each pass.

    The result equals plain beam search (Leviathan et al. 2023, appendix A.4). Each step extends all
    beams by a token and keeps the `num_beams` likeliest. Finished beams stay as they are. The other
    arguments are described at `generate`.

    Args:
        drafter: guesses how each beam continues. None makes a pass for each step.
        num_beams: number of beams.
        max_tokens: upper limit for each beam.
        num_draft_tokens: most steps to guess, or "auto".
        length_penalty: beams are ranked by logprob / length ** length_penalty.

    Raises:
        RowsError: this model's texts cannot be rows of a batch.
        UnreadableError: the drafter reads the target's states, which is impossible for several
            rows.
        ValueError: for other bad input, and its subclasses as in `generate`.
    """
    tokenizer = loaded(model, tokenizer)
    num_beams = check_int("num_beams", num_beams, 1)
    max_tokens = check_int("max_tokens", max_tokens, 1)
    prefill_step_size = check_int("prefill_step_size", prefill_step_size, 1)
    chosen = resolve(drafter, draft_model, model, tokenizer)
    tokens = check_prompt(encode(tokenizer, prompt), None, chosen)
    vocab_size = vocab_size_of(model)
    check_ids(tokens, vocab_size)
    length = guess_length_for(model, num_beams, num_draft_tokens)
    context = DraftContext(
        sampling=Sampling(),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        prefill_step_size=prefill_step_size,
    )
    for part in all_drafters(chosen):
        if part.features is not None:
            raise UnreadableError(
                f"{part.class_name} reads the target's states, which it cannot of several "
                "beams at once. Give a draft model, or a drafter that looks tokens up."
            )
    if chosen is not None:
        chosen.check(context)
    drafting = None if chosen is None else BeamDrafting(chosen, tokens, context, stream)
    with wired_limit(model, [stream]):
        rows = BeamRows(model, tokens, num_beams, prefill_step_size, stream)
        stop_tokens = frozenset(tokenizer.eos_token_ids)
        search = BeamSearch(rows, num_beams, max_tokens, stop_tokens, drafting, length)
        beams = [_as_text(tokenizer, beam, length_penalty) for beam in search.run()]
    beams.sort(key=lambda beam: -beam.score)
    return BeamSearchResponse(beams, len(tokens), search.num_passes, search.num_steps)


def _as_text(tokenizer: TokenizerWrapper, beam: Beam, length_penalty: float) -> BeamText:
    tokens = list(beam.tokens)
    text_tokens = tokens[:-1] if beam.is_finished else tokens
    score = beam.logprob / len(tokens) ** length_penalty
    reason = "stop" if beam.is_finished else "length"
    return BeamText(tokenizer.decode(text_tokens), tokens, beam.logprob, score, reason)
