"""`specdec-mlx server`: mlx-lm's OpenAI-compatible server, with drafters.

A request that is alone is served with speculation. When others arrive it goes on, with them, in
mlx-lm's batch: there the weights are read once for all of them, which drafts cannot better. What
mlx-lm never batches (a seed, quantized caches, images) is speculated for throughout.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator, _image_parts
from mlx_lm.utils import load_tokenizer

from specdec_mlx.draft_length.policy import make_draft_length
from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.draft_length.tuning import tuning_for
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.tokenizers import check_same_tokenizer
from specdec_mlx.generation import SpeculativeResponse, stream_generate
from specdec_mlx.mlx_lm_plugin.channel import Channel, Continuation
from specdec_mlx.mlx_lm_plugin.conversation import (
    Continued,
    keeping_caches,
    remember,
    text_on,
)
from specdec_mlx.mlx_lm_plugin.flags import (
    Flags,
    argparse_with_flags,
    replaced_argv,
    replaced_names,
)
from specdec_mlx.mlx_lm_plugin.requests import Menu, Requested
from specdec_mlx.sampling.mlx_lm_samplers import law_of
from specdec_mlx.target.verifier import is_pure
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import LogitsProcessor


def run_server(arguments: Sequence[str]) -> None:
    """mlx-lm's `server` with all its flags and ours; returns when it is interrupted."""
    module: Any = importlib.import_module("mlx_lm.server")
    with ExitStack() as stack:

        def on_flags(
            parser: argparse.ArgumentParser, namespace: argparse.Namespace, flags: Flags
        ) -> None:
            menu = Menu(flags)
            if menu.tokenizer is not None and namespace.model is not None:
                check_same_tokenizer(load_tokenizer(namespace.model), menu.tokenizer)
            kept = stack.enter_context(ExitStack()) if flags.keeps_tuning else None
            stack.enter_context(replaced_names(module, _names(module, menu, kept)))

        stack.enter_context(replaced_names(module, {"argparse": argparse_with_flags(on_flags)}))
        stack.enter_context(replaced_argv(["specdec-mlx server", *arguments]))
        module.main()


def _names(module: Any, menu: Menu, kept: ExitStack | None) -> dict[str, Any]:
    """What `main` of mlx-lm's server is made of, and what it is made of here.

    kept: closed when the server ends, and what was learned is kept then; None to keep nothing.
    """
    handler = partial(SpeculatingHandler, menu)
    return {
        "LRUPromptCache": ConversationCache,
        "ModelProvider": partial(CheckingProvider, kept),
        "ResponseGenerator": partial(SpeculatingGenerator, menu),
        "_run_http_server": partial(module._run_http_server, handler_class=handler),
    }


class CheckingProvider(ModelProvider):  # type: ignore[misc]
    """Loads models as mlx-lm does, compares tokenizers by content, and takes up the tuning."""

    def __init__(self, kept: ExitStack | None, *args: Any) -> None:
        """Keep tunings in `kept`, if there is one; the rest is mlx-lm's."""
        self._kept = kept
        super().__init__(*args)

    def _load(
        self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None
    ) -> None:
        super()._load(model_path, adapter_path, draft_model_path)
        if self._kept is not None:
            self._kept.close()
            self._kept.enter_context(kept_tuning(self.model, str(model_path)))
        if draft_model_path is not None:
            try:
                check_same_tokenizer(self.tokenizer, load_tokenizer(draft_model_path))
            except ValueError:
                self.reset()
                raise


class ConversationCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt caches of earlier turns, with the text that is on them.

    At least one token of a prompt is left to be fed, also if it was fed before to its end.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[Any, list[Any]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = [*rest, tokens[-1]]
        if cache is not None:
            held = tokens[: len(tokens) - len(rest)]
            remember(cache, held if all(isinstance(token, int) for token in held) else [])
        return cache, rest


class SpeculatingGenerator(ResponseGenerator):  # type: ignore[misc]
    """Serves a request with speculation while it is alone, and in mlx-lm's batch otherwise."""

    def __init__(self, menu: Menu, *args: Any) -> None:
        """Start the thread that generates."""
        self.menu = menu
        self.channels: list[Channel] = []
        if menu.tokenizer is not None:
            args[1].max_size *= 2  # a conversation has the target's caches and the draft model's
        super().__init__(*args)

    def generate(self, request: Any, generation_args: Any, *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm; what the request says about speculation goes along with its arguments.

        Not where they are sent to other machines, on which nothing is drafted.
        """
        requested = vars(request).pop("speculation", None)
        if not self._is_distributed:
            generation_args.speculation = requested or self.menu.requested({})
        return super().generate(request, generation_args, *args, **kwargs)

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next request, with its queue in a channel, so that we know when it is finished."""
        taken = super()._next_request(timeout)
        if taken is None or self._is_distributed:
            return taken
        queue, request, args = taken
        channel = queue if isinstance(queue, Channel) else Channel(queue)
        self.channels = [other for other in self.channels if other.alive and other is not channel]
        self.channels.append(channel)
        return channel, request, args

    def _is_batchable(self, args: Any) -> bool:
        """Whether to serve in a batch: what mlx-lm would, unless it is alone and can be drafted."""
        if not super()._is_batchable(args):
            return False
        if self._is_distributed or args.speculation.drafter is None:
            return True
        return sum(channel.alive for channel in self.channels) > 1 or not self.requests.empty()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As in mlx-lm; a continuation has its tokens already."""
        if isinstance(request, Continuation):
            return request.prompt, [request.prompt], ["assistant"], "normal", None
        if not self._is_distributed:
            args.speculation.batched = True  # until it is seen to be served alone
        return super()._tokenize(tokenizer, request, args)

    def _serve_single(self, taken: Any, stream: Any) -> None:
        """Serve with speculation; go on in a batch when others come."""
        if self._is_distributed:
            super()._serve_single(taken, stream)
            return
        channel, request, args = taken
        module = importlib.import_module("mlx_lm.server")
        try:
            self._check_tokenizer()
        except ValueError as error:
            channel.put(error)
            return
        streaming = partial(self._stream, channel, request, args)
        with replaced_names(module, {"stream_generate": streaming}):
            super()._serve_single(taken, stream)
        if channel.pausing:
            self._hand_over(channel, args)
        elif self.menu.flags.stats and args.speculation.stats is not None:
            logging.info(f"Speculation: {args.speculation.stats}")

    def _check_tokenizer(self) -> None:
        """Raise TokenizerMismatchError if the server's draft model is none for this model."""
        if self.menu.tokenizer is not None:
            check_same_tokenizer(self.model_provider.tokenizer, self.menu.tokenizer)

    def _stream(
        self,
        channel: Channel,
        request: Any,
        args: Any,
        *,
        model: nn.Module,
        prompt_cache: list[Any],
        draft_model: nn.Module | None,
        num_draft_tokens: int,
        sampler: Any,
        logits_processors: Sequence[LogitsProcessor],
        **options: Any,
    ) -> Iterator[SpeculativeResponse]:
        """What mlx-lm's server calls in the place of `stream_generate`."""
        requested: Requested = args.speculation
        requested.batched = channel.num_before > 0
        drafter = requested.drafter if draft_model is None else ModelDrafter(draft_model)
        if drafter is not None:
            drafter = keeping_caches(drafter, self.prompt_cache)
        earlier = text_on(prompt_cache)
        length = make_draft_length(requested.draft_length, tuning_for(model))
        responses = stream_generate(
            model,
            drafter=Continued(drafter, earlier) if earlier and drafter is not None else drafter,
            draft_length=length,
            rule=requested.rule,
            prompt_cache=prompt_cache,
            sampler=law_of(sampler) or sampler,
            logits_processors=[with_history(f, earlier) for f in logits_processors],
            **options,
        )
        with closing(responses):
            for response in responses:
                requested.stats = response.stats
                yield response
                if response.finish_reason is None and self._others_wait(request, args):
                    channel.pausing = True
                    return

    def _others_wait(self, request: Any, args: Any) -> bool:
        """Whether this request should go on in a batch with others."""
        may_batch = super()._is_batchable(args) and not any(_image_parts(request.messages))
        return may_batch and not self.requests.empty()

    def _hand_over(self, channel: Channel, args: Any) -> None:
        """Queue the rest of a request behind those that wait; its cache was just put away."""
        if not channel.alive or channel.context is None:
            channel.pausing = False
            channel.put(None)
            return
        tokenizer = self.model_provider.tokenizer
        stop_sequences, _ = self._make_state_machine(
            self.model_provider.model_key, tokenizer, args.stop_words
        )
        rest = replace(args, max_tokens=args.max_tokens - channel.num_said)
        rest.speculation = args.speculation
        rest.speculation.batched = True
        channel.resume(tokenizer.detokenizer, stop_sequences.matcher())
        prompt = [*channel.context.prompt, *channel.tokens]
        self.requests.put((channel, Continuation(prompt), rest))


def with_history(processor: LogitsProcessor, earlier: Sequence[int]) -> LogitsProcessor:
    """A logits processor that also sees the tokens whose caches were kept from earlier turns."""
    if not earlier:
        return processor
    before = to_ids(earlier)

    def seeing_all(tokens: mx.array, logits: mx.array) -> Any:
        return processor(mx.concatenate([before, to_ids(tokens)]), logits)

    seeing_all.pure = is_pure(processor)  # type: ignore[attr-defined]
    return seeing_all


class SpeculatingHandler(APIHandler):  # type: ignore[misc]
    """Reads what a request says about speculation, and adds the account to its reply."""

    def __init__(self, menu: Menu, *args: Any, **kwargs: Any) -> None:
        """Handle one connection; the base class does it all in its constructor."""
        self.menu = menu
        super().__init__(*args, **kwargs)

    def validate_model_parameters(self) -> None:
        """Raise ValueError, which becomes an HTTP 400, for what is wrong in the request."""
        super().validate_model_parameters()
        self.speculation = self.menu.requested(self.body)

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer; a client that hangs up is no error of ours."""
        request.speculation = self.speculation
        try:
            super().handle_completion(request, stop_words)
        except ConnectionError as error:
            logging.info(f"Client hung up: {error}")
            self.close_connection = True

    def generate_response(
        self, text: str, finish_reason: str | None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """mlx-lm's reply or chunk of one; the account is in `usage`, or in the last chunk."""
        reply: dict[str, Any] = super().generate_response(text, finish_reason, *args, **kwargs)
        if "usage" in reply:
            reply["usage"]["speculation"] = self.speculation.usage()
        elif finish_reason is not None:
            reply["speculation"] = self.speculation.usage()
        return reply

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for the usage."""
        reply: dict[str, Any] = super().completion_usage_response(*args, **kwargs)
        reply["usage"]["speculation"] = self.speculation.usage()
        return reply
