"""A drafter for texts that go on as they did one period ago."""

from dataclasses import dataclass

from specdec_mlx import Draft


@dataclass(frozen=True)
class Periodic:
    """Proposes the last `period` tokens again."""

    period: int = 8

    def begin(self, prompt, context):
        """Start a generation."""
        return Session(self.period, list(prompt))


class Session:
    """The tokens so far."""

    cheap = True

    def __init__(self, period, tokens):
        """Of the prompt."""
        self.period, self.tokens = period, tokens

    def propose(self, limit):
        """As it was one period ago."""
        return Draft((self.tokens[-self.period :] * limit)[:limit])

    def observe(self, tokens):
        """What was emitted."""
        self.tokens += tokens
