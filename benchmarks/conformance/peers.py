"""How each package is called: its public functions with its own defaults, on a target of ours.

A function of a package takes the target, the prompt and a `Call`, and returns a `Written`. It
raises `NotOfferedError` for what the package's functions have no argument for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_unflatten
from mlx_lm.sample_utils import make_sampler

from benchmarks.conformance.targets import HYBRID, PLAIN, VOCAB, Call, plain_text, target


class NotOfferedError(Exception):
    """The package has no argument for what was asked."""


class Written(NamedTuple):
    """A text, and how many of its tokens were drafted and accepted; None where not reported."""

    tokens: list[int]
    num_drafted: int | None
    num_accepted: int | None


Write = Callable[[nn.Module, list[int], Call], Written]
Together = Callable[[nn.Module, list[list[int]], Call, bool], list[list[int]]]


@dataclass(frozen=True)
class Peer:
    """A package.

    Attributes:
        package: its name on PyPI.
        requirement: what is installed; "" is this repository.
        calls: what is called, in words for the page.
        write: the call.
        plain: the package's own text without drafts, which mlx-lm's is for packages on its models.
        target: the model of an architecture.
        together: several texts at once, with drafts or without; None if not offered.
    """

    package: str
    requirement: str
    calls: str
    write: Write
    plain: Callable[[nn.Module, list[int], Call], list[int]] = plain_text
    target: Callable[[str], nn.Module] = target
    together: Together | None = None


def taken(steps: Generator[Any, None, None], call: Call) -> list[Any]:
    """What a generator yields until the caller closes it."""
    items: list[Any] = []
    with closing(steps):
        for item in steps:
            items.append(item)
            if len(items) == call.close_after:
                break
    return items


def noisy_copy(model: nn.Module, spread: float = 0.05) -> nn.Module:
    """A draft model: the target with noise on its weights. It is often right, but not always."""
    copy = target(model.model_type)
    mx.random.seed(1)
    copy.update(
        tree_map(lambda w: w + spread * mx.std(w) * mx.random.normal(w.shape), model.parameters())
    )
    return copy


def ours(drafter: Any) -> Write:
    """`speculate` with a drafter that is made for the target."""

    def write(model: nn.Module, prompt: list[int], call: Call) -> Written:
        import specdec_mlx as sd

        steps = sd.speculate(
            model,
            prompt,
            drafter(sd, model),
            max_tokens=call.max_tokens,
            sampler=make_sampler(call.temp),
            seed=call.seed,
            logits_processors=list(call.processors),
            prompt_cache=call.cache,
            kv_bits=call.kv_bits,
            kv_group_size=64,
            quantized_kv_start=0,
            num_draft_tokens=4,
        )
        tokens = taken(steps, call)
        return Written(
            [token.token for token in tokens],
            None,
            sum(token.from_draft for token in tokens),
        )

    return write


def ours_together(drafter: Any) -> Together:
    """`batch_generate` with a drafter, on token ids."""

    def write(
        model: nn.Module, prompts: list[list[int]], call: Call, is_drafted: bool
    ) -> list[list[int]]:
        from mlx_lm.tokenizer_utils import TokenizerWrapper
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        import specdec_mlx as sd

        given = drafter(sd, model) if is_drafted else None
        how: dict[str, Any] = {
            "max_tokens": call.max_tokens,
            "drafter": given,
            "num_draft_tokens": 4,
        }
        words = Tokenizer(
            WordLevel({chr(97 + token): token for token in range(VOCAB)}, unk_token="a")
        )
        tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words))
        texts: list[list[int]] = [[] for _ in prompts]
        for response in sd.batch_stream_generate(model, tokenizer, prompts, **how):
            texts[response.index].append(response.token)
        return texts

    return write


def mlx_lm(model: nn.Module, prompt: list[int], call: Call) -> Written:
    """`speculative_generate_step` with the noisy copy as draft model, 4 tokens a draft."""
    from mlx_lm.generate import speculative_generate_step
    from mlx_lm.models.cache import make_prompt_cache

    draft_model = noisy_copy(model)
    cache = call.cache
    if cache is not None:
        cache = [*cache, *make_prompt_cache(draft_model)]
    mx.random.seed(call.seed)
    steps = speculative_generate_step(
        mx.array(prompt),
        model,
        draft_model,
        num_draft_tokens=4,
        max_tokens=call.max_tokens,
        sampler=make_sampler(call.temp),
        logits_processors=list(call.processors) or None,
        prompt_cache=cache,
        kv_bits=call.kv_bits,
        kv_group_size=64,
        quantized_kv_start=0,
    )
    items = taken(steps, call)
    return Written(
        [int(token) for token, _, _ in items], None, sum(bool(item[2]) for item in items)
    )


def mlx_optiq(model: nn.Module, prompt: list[int], call: Call) -> Written:
    """`ngram_generate_step` with `adaptive=False`, so that costs of a tiny model decide nothing."""
    from optiq.runtime.ngram_spec import NgramStats, ngram_generate_step

    mx.random.seed(call.seed)
    stats = NgramStats()
    steps = ngram_generate_step(
        mx.array(prompt),
        model,
        max_tokens=call.max_tokens,
        sampler=make_sampler(call.temp),
        logits_processors=list(call.processors) or None,
        prompt_cache=call.cache,
        kv_bits=call.kv_bits,
        kv_group_size=64,
        quantized_kv_start=0,
        stats=stats,
        adaptive=False,
    )
    tokens = [int(token) for token, _ in taken(steps, call)]
    return Written(tokens, stats.drafted, stats.accepted)


def mlx_dspark(model: nn.Module, prompt: list[int], call: Call) -> Written:
    """`lookup_generate` with its defaults: matches of 3 or 4 tokens, drafts of up to 32."""
    from mlx_dspark import Target, lookup_generate

    if call.processors:
        raise NotOfferedError("lookup_generate has no logits processors")
    if call.close_after is not None:
        raise NotOfferedError("lookup_generate returns the whole text at its end")
    counts = [0, 0]

    def add(*, drafted: int, accepted: int, **_: Any) -> None:
        counts[0] += drafted
        counts[1] += accepted

    goal = Target(model, TOKENIZER, kv_bits=call.kv_bits, kv_group_size=64)
    result = lookup_generate(
        goal,
        TOKENIZER,
        prompt_ids=prompt,
        cache=call.cache,
        max_new_tokens=call.max_tokens,
        temperature=call.temp,
        seed=call.seed,
        on_round=add,
    )
    return Written([int(token) for token in result.token_ids], *counts)


def vision_target(name: str) -> nn.Module:
    """An architecture of mlx-vlm with the weights of `tests/vision`, and `VOCAB` tokens."""
    from importlib import import_module

    import tiny

    module = import_module("mlx_vlm.models.qwen3_5")
    if name not in (PLAIN, HYBRID):
        raise NotOfferedError("no head of this package was made for a tiny model with windows")
    config = module.ModelConfig(
        model_type="qwen3_5",
        text_config=module.TextConfig(**VISION_TEXT),
        vision_config=module.VisionConfig.from_dict(VISION),
        vocab_size=VOCAB,
        eos_token_id=[VOCAB],
    )
    mx.random.seed(0)
    model: nn.Module = module.Model(config)
    model.update(tree_unflatten(tiny.randomised(model)))
    mx.eval(model.parameters())
    return model.eval()


VISION_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "type": "mrope",
        "mrope_section": [2, 1, 1],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.125,
    },
    "full_attention_interval": 2,
}
"""Qwen3.5's language model: every second layer is gated delta. It needs a layer of either kind."""

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 2,
    "image_size": 8,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
    "num_position_embeddings": 16,
}


def vision_head(kind: str) -> nn.Module:
    """A head with random weights: it is right about once in `VOCAB` tokens."""
    import tiny

    mx.random.seed(2)
    if kind == "mtp":
        from mlx_vlm.speculative.drafters.qwen3_5_mtp import Model, ModelConfig

        text = VISION_TEXT | {"mtp_num_hidden_layers": 1}
        head = Model(ModelConfig.from_dict({"text_config": text}))
    else:
        from mlx_vlm.speculative.drafters.qwen3_dflash import Model, ModelConfig

        text = VISION_TEXT
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        head = Model(
            ModelConfig.from_dict(
                {key: text[key] for key in (*sizes, "head_dim", "vocab_size")}
                | {"num_hidden_layers": 2, "block_size": 5}
                | {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2], "num_target_layers": 4}
            )
        )
    head.update(tree_unflatten(tiny.randomised(head)))
    mx.eval(head.parameters())
    return head.eval()


def vision_plain(model: nn.Module, prompt: list[int], call: Call) -> list[int]:
    """mlx-vlm's `generate_step` without a head."""
    return [token for token, _ in vision_steps(model, prompt, call)]


def vision_steps(model: nn.Module, prompt: list[int], call: Call, **how: Any) -> list[Any]:
    """Pairs of token and log-probabilities of mlx-vlm's `generate_step`."""
    from mlx_vlm.generate.ar import generate_step

    steps = generate_step(
        mx.array([prompt]),
        model,
        None,
        None,
        max_tokens=call.max_tokens,
        temperature=call.temp,
        seed=call.seed,
        kv_bits=call.kv_bits,
        kv_group_size=64,
        quantized_kv_start=0,
        logits_processors=list(call.processors) or None,
        prompt_cache=call.cache,
        **how,
    )
    return [(int(token), rest) for token, *rest in taken(steps, call)]


def mlx_vlm(kind: str) -> Write:
    """`generate_step` with a head with random weights."""

    def write(model: nn.Module, prompt: list[int], call: Call) -> Written:
        head = vision_head(kind)
        if call.cache is not None:
            raise NotOfferedError("caches of its heads' targets are made by the package")
        tokens = [
            t for t, _ in vision_steps(model, prompt, call, draft_model=head, draft_kind=kind)
        ]
        return Written(tokens, sum(head.draft_lens), sum(head.accept_lens))

    return write


def vision_together(kind: str) -> Together:
    """`BatchGenerator` with a head."""

    def write(
        model: nn.Module, prompts: list[list[int]], call: Call, is_drafted: bool
    ) -> list[list[int]]:
        from mlx_vlm.generate.ar import BatchGenerator

        generator = BatchGenerator(
            model.language_model,
            SimpleNamespace(tokenizer=SimpleNamespace(stopping_criteria=NeverStops())),
            max_tokens=call.max_tokens,
            stop_tokens=set(),
            draft_model=vision_head(kind) if is_drafted else None,
            draft_kind=kind if is_drafted else None,
            greedy_sampling=True,
        )
        embedded = [model.get_input_embeddings(mx.array([prompt]), None) for prompt in prompts]
        rows = [{"inputs_embeds": part.inputs_embeds} for part in embedded]
        uids = generator.insert(prompts, call.max_tokens, prompt_kwargs=rows)
        texts: dict[int, list[int]] = {uid: [] for uid in uids}
        while any(len(text) < call.max_tokens for text in texts.values()):
            _, responses = generator.next()
            for response in responses:
                texts[response.uid].append(int(response.token))
        return [texts[uid][: call.max_tokens] for uid in uids]

    return write


def dflash_mlx(model: nn.Module, prompt: list[int], call: Call) -> Written:
    """`stream_dflash_generate` with a head with random weights, which is greedy only."""
    from dflash_mlx.draft_backend import EagerDraftBackend
    from dflash_mlx.engine.target_ops import bind_draft_to_target, resolve_target_ops
    from dflash_mlx.model import DFlashDraftModel, DFlashDraftModelArgs
    from dflash_mlx.runtime import stream_dflash_generate
    from dflash_mlx.runtime.context import build_offline_runtime_context

    import tiny

    if call.temp:
        raise NotOfferedError("stream_dflash_generate has no temperature")
    if call.processors:
        raise NotOfferedError("stream_dflash_generate has no logits processors")
    if call.cache is not None:
        raise NotOfferedError("stream_dflash_generate makes its own caches")
    if call.kv_bits:
        raise NotOfferedError(
            "quantize_kv_cache has no plain mode that its text could be compared with"
        )
    width = model.layers[0].input_layernorm.weight.size
    args = DFlashDraftModelArgs.from_dict(
        VISION_TEXT
        | {"model_type": "qwen3", "hidden_size": width, "num_hidden_layers": 2, "block_size": 5}
        | {"rope_theta": 1e4, "tie_word_embeddings": True, "num_target_layers": len(model.layers)}
        | {"dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]}}
    )
    mx.random.seed(2)
    head = DFlashDraftModel(args)
    head.update(tree_unflatten(tiny.randomised(head)))
    operations = resolve_target_ops(model)
    bind_draft_to_target(head, model, target_ops=operations)
    steps = stream_dflash_generate(
        target_model=model,
        target_ops=operations,
        tokenizer=TOKENIZER,
        draft_model=head,
        draft_backend=EagerDraftBackend(),
        prompt_tokens_override=prompt,
        max_new_tokens=call.max_tokens,
        stop_token_ids=[],
        runtime_context=build_offline_runtime_context(),
    )
    tokens: list[int] = []
    accepted = 0
    for event in steps:
        if type(event).__name__ == "TokenEvent":
            tokens.append(int(event.token_id))
        accepted = getattr(event, "accepted_from_draft", None) or accepted
    return Written(tokens, None, accepted)


def mlx_dspark_plain(model: nn.Module, prompt: list[int], call: Call) -> list[int]:
    """mlx-dspark's `greedy_generate`, which quantizes keys from the first token on; or mlx-lm's."""
    from mlx_dspark import Target, greedy_generate

    if call.temp or call.processors:
        return plain_text(model, prompt, call)
    goal = Target(model, TOKENIZER, kv_bits=call.kv_bits, kv_group_size=64)
    how = {"prompt_ids": prompt, "max_new_tokens": call.max_tokens}
    return [int(token) for token in greedy_generate(goal, TOKENIZER, **how).token_ids]


class NeverStops:
    """No token ends a text."""

    eos_token_ids: Sequence[int] = ()

    def add_eos_token_ids(self, _: Any) -> None:
        """Leave it so."""

    def reset(self, *_: Any) -> None:
        """Nothing to reset."""

    def __call__(self, _: Any) -> bool:
        """Never."""
        return False


class Letters:
    """A tokenizer as small as the targets: token i is the letter i, and no token ends a text."""

    eos_token_id = None
    eos_token_ids: Sequence[int] = ()
    unk_token_id = None
    vocab_size = VOCAB

    def decode(self, tokens: Iterable[int], **_: Any) -> str:
        """The letters of tokens."""
        return "".join(chr(97 + token) for token in tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        """The tokens of letters."""
        return [ord(letter) - 97 for letter in text]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """No special token is known."""
        return None if isinstance(tokens, str) else [None for _ in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Letters and their tokens."""
        return {chr(97 + token): token for token in range(VOCAB)}

    @property
    def detokenizer(self) -> Any:
        """Never asked for text."""
        return SimpleNamespace(reset=lambda: None, add_token=lambda _: None, last_segment="")


TOKENIZER = Letters()

PEERS: dict[str, Peer] = {
    "specdec_mlx, look-up": Peer(
        "specdec-mlx",
        "",
        "`speculate` with `PromptLookupDrafter`",
        ours(lambda sd, model: sd.PromptLookupDrafter()),
        together=ours_together(lambda sd, model: sd.PromptLookupDrafter()),
    ),
    "specdec_mlx, draft model": Peer(
        "specdec-mlx",
        "",
        "`speculate` with `ModelDrafter`",
        ours(lambda sd, model: sd.ModelDrafter(noisy_copy(model))),
        together=ours_together(lambda sd, model: sd.ModelDrafter(noisy_copy(model))),
    ),
    "mlx-lm": Peer("mlx-lm", "mlx-lm", "`speculative_generate_step`", mlx_lm),
    "mlx-optiq": Peer("mlx-optiq", "mlx-optiq>=0.7", "`ngram_generate_step`", mlx_optiq),
    "mlx-dspark": Peer(
        "mlx-dspark", "mlx-dspark>=0.20", "`lookup_generate`", mlx_dspark, mlx_dspark_plain
    ),
    "dflash-mlx": Peer("dflash-mlx", "dflash-mlx", "`stream_dflash_generate`", dflash_mlx),
} | {
    f"mlx-vlm, {kind}": Peer(
        "mlx-vlm",
        "mlx-vlm>=0.7",
        f'`generate_step` with `draft_kind="{kind}"`; `BatchGenerator` for several',
        mlx_vlm(kind),
        vision_plain,
        vision_target,
        vision_together(kind),
    )
    for kind in ("mtp", "dflash")
}
