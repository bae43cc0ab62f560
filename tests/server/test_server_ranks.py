"""Two ranks serve one model: the first one takes the requests, and the others write along."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

import on_ranks
from on_ranks import SENTENCES
from selection import FULL
from serving import complete, text_of, until
from specdec_mlx import generate, lab


@FULL
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """One client and then two at a time, some of which hang up in mid-stream: no text is wrong."""
    (port,) = on_ranks.free_ports(1)
    flags = ["--model", str(lab.target_path()), "--draft-model", str(lab.draft_path())]
    flags += ["--drafter", "prompt-lookup", "--port", str(port)]
    requests = [(SENTENCES[i : 60 + 7 * i % 90], i % 3 == 2) for i in range(24)]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    got: list[tuple[str, str]] = []

    def ask(own: list[tuple[str, bool]]) -> None:
        for prompt, hangs_up in own:
            reply = complete(client, prompt, max_tokens=24, stream=hangs_up)
            if hangs_up:
                next(reply)
                reply.close()
            else:
                got.append((prompt, text_of(reply)))

    with on_ranks.ranks(["-m", "specdec_mlx.server", *flags], tmp_path) as started:
        until(lambda: on_ranks.is_heard(port, started), on_ranks.TIMEOUT)
        ask(requests[:12])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask, (requests[12::2], requests[13::2])))
        started[0].process.terminate()
        assert [rank.process.wait(60) for rank in started] == [0, 0]
    assert len(got) == 16
    pair = lab.load_pair()
    for prompt, text in got:
        assert text == str(generate(pair.target, pair.tokenizer, prompt, max_tokens=24)), prompt
