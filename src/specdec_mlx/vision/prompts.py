"""Prompts with images, and generation from them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx import generation
from specdec_mlx.arguments import argument_error
from specdec_mlx.errors import PromptError
from specdec_mlx.generation import SpeculativeResponse, Text, printed
from specdec_mlx.models.loading import load_model
from specdec_mlx.options import Options
from specdec_mlx.sequence import split_cache
from specdec_mlx.vision.model import VisionModel, holds_nothing, mlx_vlm

NOT_TAKEN = {
    "kv_bits": "None, since mlx-vlm chooses otherwise which caches to quantize",
    "max_kv_size": "None; of rotating caches of your own give prompt_cache",
}
"""Options of `specdec_mlx.stream_generate`, and the value that each must have here."""

BESIDE_THE_TEXT = {"cross_attention_states", "decoder_inputs_embeds"}


def load(path: Path | str, **options: Any) -> tuple[VisionModel, Any]:
    """Model and processor of a folder or a Hugging Face name; options are those of `mlx_vlm.load`.

    Raises MissingPackageError, and ModelFolderError for what is no model.
    """
    model, processor = load_model(path, partial(mlx_vlm().load, **options))
    return VisionModel(model), processor


def read_prompt(
    model: VisionModel,
    processor: Any,
    prompt: generation.Prompt,
    images: Sequence[Any] | str = (),
    prompt_cache: list[Any] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """Encode a prompt and its images: what `speculate(model, tokens, drafter, **options)` takes.

    Args:
        model: of `load`.
        processor: of `load`.
        prompt: text, with the marks that the model has for images; chat messages, which go
            through the chat template; without images token ids too.
        images: files, URLs or PIL images, in the order of their marks.
        prompt_cache: caches of earlier turns, mlx-vlm's own too, which the prompt continues
            without images; right after mlx-vlm has read them.

    Returns:
        Token ids, of which an image has many; and the options.

    Raises:
        PromptError: images that cannot be read here.
        ValueError: other bad input.
    """
    if not isinstance(model, VisionModel):
        raise argument_error("model", model, "one of vision.load(...), or VisionModel(model)")
    images = [images] if isinstance(images, str) else images
    caches = model.make_cache() if prompt_cache is None else prompt_cache
    is_new = holds_nothing(split_cache(model, caches, Options())[0])
    config = model.model.config
    end_tokens = getattr(config, "eos_token_id", None)
    tokenizer = TokenizerWrapper(
        getattr(processor, "tokenizer", processor),
        eos_token_ids=[end_tokens] if isinstance(end_tokens, int) else end_tokens,
    )
    options = {"prompt_cache": caches, "tokenizer": tokenizer}
    inputs: dict[str, Any]
    if not images:
        inputs = {"input_ids": mx.array([generation.encode(tokenizer, prompt)])}
    elif is_new:
        inputs = encode(processor, prompt, images, config)
    else:
        raise PromptError(
            "prompt_cache holds text, and images come with the first prompt. Give the whole "
            "conversation without prompt_cache."
        )
    if is_new:
        # A first prompt without images is embedded too, so that the caches get their image state.
        options["input_embeddings"] = embed(model, caches, inputs)
    else:
        model.positions_of(caches, may_be_read=True)
    return inputs["input_ids"][0].tolist(), options


def embed(model: VisionModel, caches: list[Any], inputs: dict[str, Any]) -> mx.array:
    """Embeddings [n, D] of a complete prompt, from `encode`. The caches keep its image state.

    Caches that hold the beginning of the prompt, images included, may go on from there. Raises
    PromptError for images that cannot be read here.
    """
    reading = dict(inputs)
    tokens, pixels, mask = (
        reading.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask")
    )
    positions = model.positions_of(caches, may_be_read=True)
    with model.keeping(positions):
        made = model.model.get_input_embeddings(tokens, pixels, mask=mask, **reading)
    reading |= {k: v for k, v in made.to_dict().items() if v is not None}
    embeddings: mx.array = reading.pop("inputs_embeds")[0]
    # Further inputs, such as positions, go with every pass that reads the prompt.
    positions.reading = reading
    check_reading(model, tokens, reading)
    return embeddings


def encode(
    processor: Any, prompt: generation.Prompt, images: Sequence[Any], config: Any
) -> dict[str, Any]:
    package = mlx_vlm()
    if not isinstance(prompt, str):
        prompt = package.apply_chat_template(
            processor, config, list(prompt), num_images=len(images)
        )
    adds_special = package.utils.should_add_special_tokens
    inputs: dict[str, Any] = package.prepare_inputs(
        processor,
        images=list(images),
        prompts=prompt,
        image_token_index=getattr(config, "image_token_index", None),
        add_special_tokens=adds_special(config.model_type, processor),
    )
    return dict(inputs)


def check_reading(model: VisionModel, ids: mx.array, reading: dict[str, Any]) -> None:
    """Raise PromptError for a prompt that must be read in one pass, or beside the text."""
    # This library reads prompts in parts, and passes tokens, embeddings and caches only.
    for part in (model.model, model.language_model):
        policy = getattr(part, "chunked_prefill_policy", None)
        may_be_cut = (
            policy(input_ids=ids, prefill_kwargs=reading)
            if policy
            else not getattr(part, "no_chunked_prefill", False)
        )
        if not may_be_cut or not reading.keys().isdisjoint(BESIDE_THE_TEXT):
            raise PromptError(
                f"{type(part).__module__} reads images beside the text, or a prompt in one pass, "
                "and here it is read in parts. Use mlx_vlm.generate."
            )


def stream_generate(
    model: VisionModel,
    processor: Any,
    prompt: generation.Prompt,
    images: Sequence[Any] | str = (),
    prompt_cache: list[Any] | None = None,
    **options: Any,
) -> Generator[SpeculativeResponse, None, None]:
    """Stream the same text as `mlx_vlm.stream_generate`, sooner.

    Args:
        model: of `load`.
        processor: of `load`.
        prompt: text, chat messages or token ids; see `read_prompt`.
        images: files, URLs or PIL images.
        prompt_cache: caches of earlier turns.
        options: those of `specdec_mlx.stream_generate`, but `draft_model`, `kv_bits` and
            `max_kv_size`. Greedy without `temp` or `sampler`, whatever the checkpoint says.

    Yields:
        As `specdec_mlx.stream_generate`, where it says what is raised, as `read_prompt` does.
    """
    for name, expected in NOT_TAKEN.items():
        if options.get(name) is not None:
            raise argument_error(name, options[name], expected)
    tokens, read = read_prompt(model, processor, prompt, images, prompt_cache)
    return generation.stream_generate(model, prompt=tokens, **read, **options)


def generate(
    model: VisionModel,
    processor: Any,
    prompt: generation.Prompt,
    images: Sequence[Any] | str = (),
    verbose: bool = False,
    **options: Any,
) -> Text:
    """The text of `stream_generate`; `verbose` prints it as it comes, and the account."""
    responses = stream_generate(model, processor, prompt, images, **options)
    return Text.of(printed(responses) if verbose else responses)
