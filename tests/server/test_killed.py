"""A server that is killed at any moment goes on with what it had kept, and writes no wrong text."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx_lm
import openai

from on_ranks import free_ports
from selection import FULL
from serving import chat, text_of, until
from tiny_model_folder import write_model_folder

SYSTEM = {"role": "system", "content": "the other hat is on the mat, and the cat is in it"}
SAID = ["in the hat", "and then the other one", "on the mat", "there and then and there"]


def asked(turns: list[str]) -> list[dict[str, str]]:
    """A conversation of what a user and the model said in turn."""
    roles = ["user", "assistant"] * len(turns)
    return [SYSTEM, *({"role": r, "content": t} for r, t in zip(roles, turns, strict=False))]


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


KILLS = int(os.environ.get("KILLS", "3"))


@FULL
def test_a_killed_server_goes_on_without_wrong_texts(tmp_path: Path) -> None:
    """It is killed at random moments; of what was answered only the last entry may be lost."""
    # A fast machine answers many turns before a kill: the model has positions for all of them.
    folder = write_model_folder(tmp_path / "model", max_position_embeddings=2**20)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    coins, (port,) = random.Random(7), free_ports(1)
    command = [sys.executable, "-m", "specdec_mlx", "server", "--model", str(folder)]
    command += ["--port", str(port), "--prompt-cache", str(tmp_path / "kept")]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    turns: list[str] = [SAID[0]]
    saved: list[int] = [0, 0]  # positions that the last but one answer, and the last, came to
    for kill in range(KILLS):
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        timer, num_said = threading.Timer(coins.uniform(0, 0.5), server.kill), 0
        try:
            while server.poll() is None:
                if num_said == (2, 1, 0)[kill % 3]:
                    timer.start()
                prompt = tokenizer.apply_chat_template(asked(turns), add_generation_prompt=True)
                reply = chat(client, asked(turns), max_tokens=24)
                text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
                assert text_of(reply) == text
                assert cached(reply) >= saved[min(num_said, 1)] - 1
                num_said += 1
                saved = [saved[1], reply.usage.total_tokens - 1]
                turns += [text, coins.choice(SAID)]
        except openai.APIConnectionError:
            pass
        finally:
            server.kill()
            server.wait(timeout=60)
    assert len(turns) > KILLS, "some were answered in between"
