"""The lab: instruments, proofs, training, a trained pair, and systems of papers.

    target, draft, tokenizer = lab.load_pair()
    drafter = lab.head("mtp", target)

    def test_my_drafter_keeps_the_contract():
        lab.check_drafter(MyDrafter())

The pair ships with the package: a small target and its drafter, real distributions offline. Both
are ordinary mlx-lm model folders in float32 in the cache; the package has them in 8 bits a weight.
They know the manner of Python's own reference manual, one byte a token, and nothing else.
`MODEL_CARD.md` beside this file says how they were trained and how well they agree;
`benchmarks/lab` in the repository makes them. A module is imported when a name of it is used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.lab.beams.generation import BeamSearchResponse as BeamSearchResponse
    from specdec_mlx.lab.beams.generation import BeamText as BeamText
    from specdec_mlx.lab.beams.generation import beam_search as beam_search
    from specdec_mlx.lab.bench.cost import CostCurve as CostCurve
    from specdec_mlx.lab.bench.cost import linear_cost as linear_cost
    from specdec_mlx.lab.bench.record import load_record as load_record
    from specdec_mlx.lab.bench.replay import score_record as score_record
    from specdec_mlx.lab.bench.run import bench_texts as bench_texts
    from specdec_mlx.lab.bench.timing import Settings as Settings
    from specdec_mlx.lab.counterfactual import Counterfactual as Counterfactual
    from specdec_mlx.lab.demo_model import demo_model_path as demo_model_path
    from specdec_mlx.lab.pair import HEADS as HEADS
    from specdec_mlx.lab.pair import Pair as Pair
    from specdec_mlx.lab.pair import draft_path as draft_path
    from specdec_mlx.lab.pair import head as head
    from specdec_mlx.lab.pair import head_path as head_path
    from specdec_mlx.lab.pair import load_pair as load_pair
    from specdec_mlx.lab.pair import target_path as target_path
    from specdec_mlx.lab.papers.cascade import Cascade as Cascade
    from specdec_mlx.lab.papers.early_exit import early_exit as early_exit
    from specdec_mlx.lab.papers.lookahead import LookaheadDrafter as LookaheadDrafter
    from specdec_mlx.lab.papers.lossy import Lenient as Lenient
    from specdec_mlx.lab.papers.lossy import Typical as Typical
    from specdec_mlx.lab.papers.ngram_table import NGramTable as NGramTable
    from specdec_mlx.lab.papers.ngram_table import TabledNGramDrafter as TabledNGramDrafter
    from specdec_mlx.lab.papers.parallel_sampling import PaSSDrafter as PaSSDrafter
    from specdec_mlx.lab.papers.recycling import RecyclingDrafter as RecyclingDrafter
    from specdec_mlx.lab.papers.stochastic_ngrams import (
        StochasticNGramDrafter as StochasticNGramDrafter,
    )
    from specdec_mlx.lab.papers.suffix_trees import SuffixTreeDrafter as SuffixTreeDrafter
    from specdec_mlx.lab.papers.trees_of_several import TreeOf as TreeOf
    from specdec_mlx.lab.papers.vertical_cascade import GuessedDrafter as GuessedDrafter
    from specdec_mlx.lab.probing import ProbeReport as ProbeReport
    from specdec_mlx.lab.probing import probe as probe
    from specdec_mlx.lab.proof import CheckReport as CheckReport
    from specdec_mlx.lab.proof import check as check
    from specdec_mlx.lab.proof.drafter import check_drafter as check_drafter
    from specdec_mlx.lab.proof.rule import check_rule as check_rule
    from specdec_mlx.lab.proof.strategy import check_strategy as check_strategy
    from specdec_mlx.lab.training.fitting import Updates as Updates
    from specdec_mlx.lab.training.online import learning_on as learning_on
    from specdec_mlx.lab.training.run import Data as Data
    from specdec_mlx.lab.training.run import Plan as Plan
    from specdec_mlx.lab.training.run import train as train

_PLACES = {
    "BeamSearchResponse": "beams.generation",
    "BeamText": "beams.generation",
    "Cascade": "papers.cascade",
    "CheckReport": "proof",
    "CostCurve": "bench.cost",
    "Counterfactual": "counterfactual",
    "Data": "training.run",
    "GuessedDrafter": "papers.vertical_cascade",
    "HEADS": "pair",
    "Lenient": "papers.lossy",
    "LookaheadDrafter": "papers.lookahead",
    "NGramTable": "papers.ngram_table",
    "PaSSDrafter": "papers.parallel_sampling",
    "Pair": "pair",
    "Plan": "training.run",
    "ProbeReport": "probing",
    "RecyclingDrafter": "papers.recycling",
    "Settings": "bench.timing",
    "StochasticNGramDrafter": "papers.stochastic_ngrams",
    "SuffixTreeDrafter": "papers.suffix_trees",
    "TabledNGramDrafter": "papers.ngram_table",
    "TreeOf": "papers.trees_of_several",
    "Typical": "papers.lossy",
    "Updates": "training.fitting",
    "beam_search": "beams.generation",
    "bench_texts": "bench.run",
    "check": "proof",
    "check_drafter": "proof.drafter",
    "check_rule": "proof.rule",
    "check_strategy": "proof.strategy",
    "demo_model_path": "demo_model",
    "draft_path": "pair",
    "early_exit": "papers.early_exit",
    "head": "pair",
    "head_path": "pair",
    "learning_on": "training.online",
    "linear_cost": "bench.cost",
    "load_pair": "pair",
    "load_record": "bench.record",
    "probe": "probing",
    "score_record": "bench.replay",
    "target_path": "pair",
    "train": "training.run",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(_import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
