"""Totals of a server: `/metrics` for Prometheus, in vLLM's names, and a page to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from specdec_mlx.server.requests import Ended
from specdec_mlx.stats.account import kind_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFRESH = 5  # seconds after which the page is read anew

COUNTERS = {
    "requests": ("request_success", "Requests answered."),
    "prompt": ("prompt_tokens", "Tokens of prompts."),
    "cached": ("prefix_cache_hits", "Tokens of prompts that were on a cache."),
    "emitted": ("generation_tokens", "Tokens generated."),
    "passes": ("iterations", "Passes of the target after the prompts."),
    "drafts": ("spec_decode_num_drafts", "Drafts verified."),
    "drafted": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
"""Counts, their names at vLLM less its prefix and Prometheus's suffix, and what they are."""
GAUGES = {
    "running": ("num_requests_running", "Requests running."),
    "waiting": ("num_requests_waiting", "Requests waiting."),
    "cached": ("prompt_cache_bytes", "Bytes of kept conversations, with the states of drafters."),
}
"""Present values, their names less vLLM's prefix, and what they are."""

BY_POSITION = (
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Draft tokens accepted, by their position in the draft.",
)

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 44rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td { padding: .2rem 1.5rem .2rem 0; vertical-align: top }
td + td { text-align: right; font-variant-numeric: tabular-nums }
.large { font-size: 2.5rem; margin: 0 }
"""


@dataclass(eq=False)
class Totals:
    """Counts of all texts since the start. Only one thread changes them.

    Attributes:
        at: position in a draft -> draft tokens accepted there.
        by_drafter: name -> [drafted, accepted].
    """

    counts: Counter[str] = field(default_factory=Counter)
    at: Counter[int] = field(default_factory=Counter)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)

    def add(self, ended: Ended) -> None:
        """Add a text that was written; what a stop string cut off its last round does not count."""
        stats = ended.stats
        passes = ended.num_written if stats is None else stats.target_passes
        self.counts.update(
            requests=1,
            prompt=ended.num_prompt,
            cached=ended.num_cached,
            emitted=ended.num_written,
            passes=passes,
            accepted=ended.accepted,
        )
        if stats is None:
            return
        self.counts.update(
            drafted=stats.drafted, drafts=sum(drafted > 0 for drafted, _ in stats.rounds)
        )
        self.at.update(dict(enumerate(stats.accepted_at)))
        # A stop string cuts off the last accepted positions of the last round.
        last = stats.rounds[-1][1] if stats.rounds else 0
        cut = max(0, stats.accepted - ended.accepted)
        self.at.subtract(range(max(0, last - cut), last))
        for key, counts in stats.by_drafter.items():
            known = self.by_drafter.setdefault(kind_of(key), [0, 0])
            known[:] = [a + b for a, b in zip(known, counts, strict=True)]

    def _figures(self, gauges: Mapping[str, int]) -> list[tuple[str, str, int]]:
        """Name, words and value of each figure."""
        figures = [(*GAUGES[key], value) for key, value in gauges.items()]
        for key, (name, words) in COUNTERS.items():
            figures.append((f"{name}_total", words, self.counts[key]))
        return figures

    def metrics(self, gauges: Mapping[str, int]) -> str:
        """Prometheus's text format; gauges: by the keys of `GAUGES`."""
        lines = []
        samples = [(name, words, {"": value}) for name, words, value in self._figures(gauges)]
        at = {f'{{position="{i}"}}': number for i, number in sorted(self.at.items())}
        for name, words, values in (*samples, (*BY_POSITION, at)):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP vllm:{name} {words}", f"# TYPE vllm:{name} {kind}"]
            lines += [f"vllm:{name}{label} {value}" for label, value in values.items()]
        return "\n".join([*lines, ""])

    def page(self, gauges: Mapping[str, int]) -> str:
        """HTML of the counts, without scripts; it is read anew every few seconds."""
        figures = [(words, f"{value:,}") for _, words, value in self._figures(gauges)]
        shares = [
            (name, f"{accepted:,} of {drafted:,} ({accepted / max(1, drafted):.0%})")
            for name, (drafted, accepted) in sorted(self.by_drafter.items())
        ]
        if shares:
            figures += [("Drafter", "draft tokens accepted"), *shares]
        cells = [f"<tr><td>{escape(left)}<td>{escape(right)}" for left, right in figures]
        a_pass = self.counts["emitted"] / max(1, self.counts["passes"])
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>specdec_mlx</title>'
            f'<meta name="viewport" content="width=device-width">'
            f'<meta http-equiv="refresh" content="{REFRESH}"><style>{STYLE}</style>'
            f'<h1>specdec_mlx</h1><p class="large">{a_pass:.2f}</p><p>tokens per pass</p>'
            f"<p>Since the start</p><table>{''.join(cells)}</table></html>"
        )
