"""`specdec-mlx server`: mlx-lm's OpenAI-compatible server, with drafters.

A request that is alone is served with speculation; when others arrive it goes on as a row of one
batch, in which each is drafted for. Models whose texts cannot be rows, and those on several ranks,
are batched by mlx-lm, seeds and grammars served alone there; as are quantized caches and images.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import CacheNotFound
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import ResponseGenerator, _image_parts, get_system_fingerprint
from mlx_lm.utils import load_tokenizer

from specdec_mlx.batch.schedule import OwnDrafting, Request
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.fingerprint import content_digest
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import GrammarDrafter, GrammarProcessor, compiled_tokenizer
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.generation import stream_generate
from specdec_mlx.memory.store import PROCESS
from specdec_mlx.mlx_lm_plugin import conversation, heads, openai_fields, requests
from specdec_mlx.mlx_lm_plugin.batch import GuardedGrammar, SpeculatingBatch, has_rows
from specdec_mlx.mlx_lm_plugin.flags import Flags, replaced_names, run_main
from specdec_mlx.mlx_lm_plugin.handler import SpeculatingHandler
from specdec_mlx.mlx_lm_plugin.openai_fields import Refused, RequestError
from specdec_mlx.mlx_lm_plugin.prefix_files import PrefixFiles, stateful
from specdec_mlx.mlx_lm_plugin.requests import Channel, Menu, Requested
from specdec_mlx.mlx_lm_plugin.status import Totals
from specdec_mlx.models import PerModel, explained
from specdec_mlx.responses import SpeculativeResponse
from specdec_mlx.sampling.mlx_lm_samplers import read_sampler
from specdec_mlx.verify.inputs import check_ids, check_prompt
from specdec_mlx.verify.model_pass import vocab_size_of

MODULE: Any = importlib.import_module("mlx_lm.server")


def run_server(arguments: Sequence[str]) -> None:
    """mlx-lm's `server` with all its flags and ours; returns when it is interrupted."""
    with ExitStack() as stack:

        def on_flags(namespace: argparse.Namespace, flags: Flags) -> None:
            if namespace.memory is None and requests.is_loopback(namespace.host):
                flags = replace(flags, memory=PROCESS)  # one person's
            menu = Menu(flags, requests.Access.of(namespace, flags.choice.model.name))
            stack.callback(flags.save_memory)
            if (folder := namespace.prompt_cache) is not None:
                folder.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
            tokenizer = None
            if namespace.model is not None:  # to say now what the generating thread could not
                with explained(namespace.model):
                    how = {"trust_remote_code": namespace.trust_remote_code}
                    tokenizer = load_tokenizer(namespace.model, how)
                menu.check(tokenizer)
            menu.bind_files(tokenizer)
            kept = stack.enter_context(ExitStack()) if flags.keeps_tuning else None
            stack.enter_context(replaced_names(MODULE, _names(menu, kept, stack)))

        run_main(MODULE, arguments, on_flags, requests.add_server_arguments)


def _names(menu: Menu, kept: ExitStack | None, stack: ExitStack) -> dict[str, Any]:
    """Replacements for names that `main` of mlx-lm's server uses; kept saves tunings at the end."""
    load_processor, scan = MODULE.load_processor, MODULE.scan_cache_dir
    handler = partial(SpeculatingHandler, menu, Totals())

    def noting_config(model: nn.Module, config: dict[str, Any]) -> Any:
        heads.configuration.put(model, config)
        return load_processor(model, config)

    def scan_what_is_there() -> Any:
        try:
            found = scan().repos
        except (CacheNotFound, ValueError):
            found = []
        return SimpleNamespace(repos=[r for r in found if menu.access.allows("model", r.repo_id)])

    return {
        "load_processor": noting_config,
        "scan_cache_dir": scan_what_is_there,
        "LRUPromptCache": heads.ConversationCache,
        "ModelProvider": partial(heads.CheckingProvider, kept),
        "ResponseGenerator": partial(SpeculatingGenerator, menu, stack),
        "_run_http_server": partial(MODULE._run_http_server, handler_class=handler),
    }


class SpeculatingGenerator(ResponseGenerator):  # type: ignore[misc]
    """Serves a request with speculation while it is alone, and in a batch with others."""

    def __init__(self, menu: Menu, stack: ExitStack, *args: Any) -> None:
        """Start the thread that generates; it stops with the stack at the latest."""
        self.menu = menu
        self.channels: list[Channel] = []
        self._latest: Any = None
        self.draft_caches: LRUPromptCache = args[1]
        if mx.distributed.init().size() > 1:  # the first rank alone has caches of a draft model
            self.draft_caches = LRUPromptCache(args[1].max_size)
        elif menu.choice.model.name is not None and not menu.choice.model.is_head:
            args[1].max_size *= 2  # a conversation has the target's caches and the draft model's
        if (most_bytes := args[0].cli_args.prompt_cache_bytes) is not None:
            args[1].max_bytes = most_bytes  # mlx-lm minds it in batches alone
        args[1].of_content, self._opened = self._of_content, lru_cache(PrefixFiles)
        self._key_of = PerModel(self._prefix_key)
        super().__init__(*args)
        stack.callback(self.stop_and_join)

    def _of_content(self, key: Any) -> tuple[Any, PrefixFiles | None]:
        """For `ConversationCache`; files of the target's caches alone, and not on several ranks."""
        provider, options = self.model_provider, self.cli_args
        if key != provider.model_key:
            return key, None
        place = key, provider.files
        if options.prompt_cache is None or self._is_distributed or provider.draft_model is not None:
            return place, None
        folder: Path = options.prompt_cache.expanduser().absolute()
        return place, self._opened(folder, self._key_of(provider.model), options.prompt_cache_limit)

    def _prefix_key(self, model: nn.Module) -> str:
        """Digest of all that the caches of the loaded model depend on, 16 hexadecimal digits."""
        adapter, options = self.model_provider.model_key[1], self.cli_args
        config = heads.configuration(model)
        about = [
            config,
            adapter and json.loads((Path(adapter) / "adapter_config.json").read_text()),
            self.model_provider.files if config.get("model_file") else (),  # code of its own
            (options.kv_bits, options.kv_group_size, options.quantized_kv_start),
            get_system_fingerprint(),
        ]
        return content_digest(model, about)[:16]

    def _generate(self) -> None:
        """Run mlx-lm's loop, which batches with what it finds under this name."""
        with replaced_names(MODULE, {"BatchGenerator": self._new_batch}):
            super()._generate()

    def _new_batch(self, model: nn.Module, *, stream: Any, **sizes: int) -> Any:
        if not self._has_rows():
            return BatchGenerator(model, stream=stream, **sizes)
        tokenizer = self.model_provider.tokenizer
        self.model_provider.batch = batch = SpeculatingBatch(
            model, lambda: self._latest, self._with_drafts, tokenizer, stream, **sizes
        )
        return batch

    def _has_rows(self) -> bool:
        """True if requests that run together are drafted for: each rank would draft differently."""
        return not self._is_distributed and has_rows(self.model_provider.model)

    def _with_drafts(self, requested: Requested, text: Request) -> Request:
        """What goes into the batch, with its drafter and grammar; raises what these raise."""
        model, tokenizer = self.model_provider.model, self.model_provider.tokenizer
        drafter = heads.without_readers(heads.with_heads(requested.drafter, model))
        drafter = self._drafter(drafter, requested)
        processors = list(text.logits_processors)
        if requested.grammar is not None:
            start = len(text.prompt) - text.num_said
            processors.append(GuardedGrammar(requested.grammar, tokenizer, start))
        own = None if requested.draft_length == "auto" else requested.draft_length
        how = OwnDrafting(drafter, requested.rule, own)
        sampler = read_sampler(text.sampler) or text.sampler
        return replace(text, sampler=sampler, logits_processors=processors, drafting=how)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any) -> Any:
        """As in mlx-lm; ends if the client has gone by a token or a part of the prompt.

        Raises Refused for all that it raises before the first token.
        """
        requested = generation_args.speculation = vars(request).pop("speculation")

        def on_progress(done: int, total: int) -> None:
            requested.check_client()
            progress_callback(done, total)

        try:
            grammar, tokenizer = requested.grammar, self.model_provider.tokenizer
            if grammar is not None and tokenizer is not None:
                openai_fields.within(lambda: grammar.begin(compiled_tokenizer(tokenizer)))
            context, responses = super().generate(request, generation_args, on_progress)
        except Exception as error:
            raise Refused(error) from error

        def watched() -> Iterator[Any]:
            for response in responses:
                requested.check_client()
                yield response

        return context, watched()

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next request, with its queue in a channel."""
        taken = super()._next_request(timeout)
        if taken is None:
            return taken
        channel, request, args = taken
        if not isinstance(channel, Channel):
            channel = Channel(channel, is_watched=self._is_distributed)
        others = [other for other in self.channels if other.alive and other is not channel]
        self.channels = [*others, channel]
        args.speculation.channel = channel
        return channel, request, args

    def _is_batchable(self, args: Any) -> bool:
        """True to serve it in a batch: as mlx-lm, unless it is alone and can be drafted for."""
        return bool(self._from_first(self._should_batch(args)))

    def _from_first(self, value: Any) -> Any:
        """The first rank's value, on all ranks: it alone knows who waits, and who hung up."""
        return self._share_object((value,))[0]

    def _should_batch(self, args: Any) -> bool:
        is_drawn_alone = self._is_drawn_alone(args)
        if args.speculation.drafter is not None or is_drawn_alone:
            others = sum(other.alive for other in self.channels) > 1 or not self.requests.empty()
            half_served = args.speculation.channel.num_before > 0
            if not others and not (half_served and is_drawn_alone):
                return False  # the noise of one that is half served goes on in the middle
        return self._may_be_batched(args)

    def _is_drawn_alone(self, args: Any) -> bool:
        """True if mlx-lm's batch could not serve it; a grammar's error there would end all."""
        return args.seed is not None or args.speculation.grammar is not None

    def _may_be_batched(self, args: Any) -> bool:
        if not self.model_provider.is_batchable or self.cli_args.kv_bits is not None:
            return False
        return not self._is_drawn_alone(args) or self._has_rows()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As in mlx-lm, checked; a prompt of token ids, and so the rest of a request, is read."""
        self._latest = args
        requested: Requested = args.speculation
        requested.batched = True  # until it is seen to be served alone
        if requested.grammar is not None:
            own = args.chat_template_kwargs or {}
            args.chat_template_kwargs = {"enable_thinking": False, **own}
        model, prompt = self.model_provider.model, request.prompt
        self.menu.check(tokenizer)
        heads.with_heads(requested.drafter, model)
        vocab_size = vocab_size_of(model)
        try:
            if isinstance(prompt, list):
                check_ids(check_prompt(prompt, None, None), vocab_size)
                segments, kinds, state, vision = [prompt], ["assistant"], "normal", None
            else:
                read = super()._tokenize(tokenizer, request, args)
                prompt, segments, kinds, state, vision = read
        except Exception as error:
            raise RequestError(f"The prompt cannot be read: {error}") from error
        wanted = None if requested.channel.num_before else requested.max_tokens
        room = openai_fields.room_after(len(prompt), heads.longest_text(model), wanted)
        args.max_tokens = min(args.max_tokens, room)
        openai_fields.check_bias(args.logits.logit_bias, vocab_size)
        if args.sampling.top_k >= vocab_size:
            args.sampling.top_k = 0  # all of them; in a batch mlx-lm's own error ends the server
        if requested.grammar is not None:
            state = "normal"  # the grammar is that of the answer, so there are no thoughts before
        requested.prompt = [] if vision is not None else prompt
        requested.ends = list(accumulate(map(len, segments)))
        return prompt, segments, kinds, state, vision

    def _serve_single(self, taken: Any, stream: Any) -> None:
        """Serve with speculation; go on with others when they come."""
        channel, request, args = taken
        channel.is_alone = True
        with replaced_names(MODULE, {"stream_generate": partial(self._stream, taken)}):
            super()._serve_single(taken, stream)
        if self._from_first(channel.pausing):
            if self._rank == 0 and channel.alive:
                self._hand_over(channel, request, args)
        elif self.menu.flags.stats and args.speculation.stats is not None:
            logging.info(f"Speculation: {args.speculation.stats}")

    def _stream(
        self, taken: Any, *, model: nn.Module, prompt_cache: list[Any], **options: Any
    ) -> Iterator[SpeculativeResponse]:
        """The responses of one request; mlx-lm's server calls it for `stream_generate`."""
        channel, request, args = taken
        requested: Requested = args.speculation
        requested.batched = channel.num_before > 0
        sampler = options["sampler"]
        self._keep_points(channel, requested, prompt_cache, options)
        options["sampler"] = read_sampler(sampler) or sampler
        del options["num_draft_tokens"]  # the request's own counts
        drafter = heads.with_heads(requested.drafter, model) or self.model_provider.head
        if (draft_model := options.pop("draft_model")) is not None:
            drafter = ModelDrafter(draft_model)
        earlier = conversation.tokens_on(prompt_cache)
        processors = options.pop("logits_processors")
        processors = [conversation.with_history(f, earlier) for f in processors]
        if requested.grammar is not None:
            processors.append(GrammarProcessor(requested.grammar, options["tokenizer"]))
        responses = stream_generate(
            model,
            drafter=conversation.continued(self._drafter(drafter, requested), earlier),
            draft_length=requested.draft_length,
            rule=requested.rule,
            seed=args.seed,
            prompt_cache=prompt_cache,
            logits_processors=processors,
            **options,
        )
        is_movable = not any(_image_parts(request.messages))
        with closing(responses):
            for response in responses:
                requested.stats = response.stats
                yield response
                if self._is_distributed and not channel.alive:
                    return  # mlx-lm itself cannot stop here
                self._check_goes_on(channel)
                others_wait = is_movable and not self.requests.empty()
                if others_wait and response.finish_reason is None and self._may_be_batched(args):
                    channel.pausing = True
                    return

    def _keep_points(
        self, channel: Channel, requested: Requested, caches: list[Any], options: dict[str, Any]
    ) -> None:
        """Keep caches that cannot be shortened as they are read: at ends of segments and passes."""
        on_progress = options["prompt_progress_callback"]
        start = len(requested.prompt) - len(options["prompt"])
        keeps = requested.prompt and options["kv_bits"] is None and stateful(caches)
        if keeps:
            options["prefill_stops"] = [end - start for end in requested.ends if end > start]

        def read(done: int, total: int) -> None:
            on_progress(done, total)
            if keeps and 0 < done < total:
                held, key = requested.prompt[: start + done], self.model_provider.model_key
                self.prompt_cache.insert_cache(key, held, copy.deepcopy(caches), cache_type="user")
            self._check_goes_on(channel)

        options["prompt_progress_callback"] = read

    def _check_goes_on(self, channel: Channel) -> None:
        """Raise where a request that is served alone is to end, on one rank."""
        if self._is_distributed:
            return
        if self._stop:
            raise requests.ServerEndingError
        if not channel.alive:
            raise ConnectionError("The client has gone.")

    def _drafter(self, drafter: Drafter | None, requested: Requested) -> Drafter | None:
        """The drafter with the request's prediction and grammar, and caches that are kept."""
        if drafter is None:
            return None
        if requested.prediction:
            encode = self.model_provider.tokenizer.encode
            tokens = encode(requested.prediction, add_special_tokens=False)
            drafter = conversation.predicting(drafter, tokens)
        drafter = conversation.keeping_caches(drafter, self.draft_caches)
        return drafter if requested.grammar is None else FirstOf(GrammarDrafter(), drafter)

    def _hand_over(self, channel: Channel, request: Any, args: Any) -> None:
        """Queue the rest of a request after those that wait; its cache was just put away."""
        tokenizer, key = self.model_provider.tokenizer, self.model_provider.model_key
        stop_sequences, _ = self._make_state_machine(key, tokenizer, args.stop_words)
        rest = replace(args, max_tokens=args.max_tokens - len(channel.tokens) + channel.num_before)
        rest.speculation = args.speculation
        channel.resume(tokenizer.detokenizer, stop_sequences.matcher())
        prompt = [*channel.context.prompt, *channel.tokens]
        self.requests.put((channel, replace(request, prompt=prompt), rest))
