"""The scripted target of `benchmarks.agents`: a model folder's own code, which mlx-lm runs.

Its only layer keeps what it reads on an ordinary cache, as keys; the next token is a function of
the tokens that are visible there, whatever wrote them: a prompt read anew or taken from a cache,
rows of a batch, drafts, trees. It answers a chat as an agent's model would: it calls the tools that
the prompt names to read a file, to mend it and to run its test, and says what the test printed.
"""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent
END, ASSISTANT = "</s>", "<|assistant|>"
ROLES = ("<|system|>", "<|user|>", ASSISTANT, "<|tool|>")
FILE, TEST = "area.py", "python3 check.py"
WRONG = re.compile(r"    return width \+ height  # rule (\w+)")
PATH = re.compile(r"/\S*/area\.py")
LISTED, WHOLE = re.compile(r"area\.py\n```\n(.*?)```", re.DOTALL), "*file listing* format"
PASSED = re.compile(r"All checks passed with (\w+)")
READERS = ("Read", "read", "read_file", "read_files")
EDITORS = ("Edit", "edit", "replace_in_file", "MultiEdit", "editor")
PATCHERS = ("apply_patch",)
SHELLS = (
    *("Bash", "bash", "exec_command", "shell_command", "shell"),
    *("run_shell_command", "execute_command", "run_commands", "exec"),
)
SCRIPTS = "exec"  # takes JavaScript, in which the other tools are functions
ENDS = ("attempt_completion",)
VALUES: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "object": {}}
"""What a required argument gets that no rule names, by its type; a string gets a few words."""

MOST_CALLS = 8


class ModelArgs:
    """Of the folder's config.json."""

    def __init__(self, vocab_size: int, model_type: str) -> None:
        self.vocab_size, self.model_type = vocab_size, model_type

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        """Out of its fields."""
        return cls(config["vocab_size"], config["model_type"])


class Model(nn.Module):  # type: ignore[misc]
    """Next tokens by `Script`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.one, self.layers = mx.ones(1), [nn.Identity()]
        self._script = Script(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))

    def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> mx.array:
        """[B, T] ids -> logits [B, T, V]."""
        keys, mask = inputs[:, None, :, None].astype(mx.float32), None
        if cache is not None and cache[0] is not None:
            mask = cache[0].make_mask(inputs.shape[1], return_array=False, window_size=None)
            keys, _ = cache[0].update_and_fetch(keys, keys)
        following = mx.array(self._script.after(inputs.shape[1], keys, mask))
        return (following[..., None] == mx.arange(self.args.vocab_size)) * 20.0 * self.one


class Script:
    """What is written after a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.roles = {tokenizer.token_to_id(role): role for role in ROLES}
        self.end, self.mark = (tokenizer.token_to_id(token) or 0 for token in (END, ASSISTANT))
        self.answers: dict[bytes, list[int]] = {}

    def after(self, length: int, keys: mx.array, mask: Any) -> np.ndarray:
        """The token after each of the last `length` positions [B, T].

        Args:
            length: T.
            keys: [B, 1, S, 1] what stands on the cache.
            mask: None or "causal", or [..., T, S]: what each position sees.
        """
        tokens = np.array(keys[:, 0, :, 0]).astype(np.int32)
        rows, past = len(tokens), tokens.shape[1] - length
        seen = None
        if isinstance(mask, mx.array):
            seen = np.array(mask).reshape(-1, length, tokens.shape[1])
        following = np.full((rows, length), self.end, np.int32)
        for b in range(rows):
            for t in range(length):
                text = tokens[b, : past + t + 1]
                if seen is not None:
                    text = tokens[b][seen[b % len(seen), t]]
                following[b, t] = self.next(text)
        return following

    def next(self, text: np.ndarray) -> int:
        """The token after a text: of the answer to what stands before the last assistant's mark."""
        marks = np.flatnonzero(text == self.mark)
        if not len(marks):
            return self.end
        chat, num_written = text[: marks[-1]], len(text) - marks[-1] - 1
        key = chat.tobytes()
        if key not in self.answers:
            written = answer(self.turns(chat))
            ids = self.tokenizer.encode(written, add_special_tokens=False).ids
            self.answers[key] = [*ids, self.end]
        ids = self.answers[key]
        return ids[num_written] if num_written < len(ids) else self.end

    def turns(self, chat: np.ndarray) -> list[tuple[str, str]]:
        """Role and text of each turn."""
        turns: list[tuple[str, list[int]]] = []
        for token in chat.tolist():
            if token in self.roles:
                turns.append((self.roles[token], []))
            elif turns:
                turns[-1][1].append(token)
        return [(role, self.tokenizer.decode(ids)) for role, ids in turns]


def answer(turns: list[tuple[str, str]]) -> str:
    """What an agent's model says after these turns."""
    tasks = [i for i, (role, text) in enumerate(turns) if role == "<|user|>" and TEST in text]
    if not tasks:
        return "Mend area.py"  # a helper's question, as for a title
    every = "\n".join(text for _, text in turns)
    results = [text for role, text in turns[tasks[0] + 1 :] if role != ASSISTANT]
    said = "".join(text for role, text in turns[tasks[0] :] if role == ASSISTANT)
    wrong, passed = WRONG.search(every), PASSED.search("\n".join(results))
    agent = Agent(tools_of(turns[0][1]), PATH.search(turns[tasks[0]][1]))
    if passed:
        return agent.end(f"The function is mended, and the test says: {passed[0]}")
    if len(results) > MOST_CALLS:
        return "I give up. " + results[-1]
    if not agent.tools:
        return "Mend area.py" if wrong is None else as_text(wrong[0], every)
    if "width * height" in said:
        return "Now I run the test.\n" + agent.run(TEST)
    if wrong is not None:
        return "It adds where it should multiply. I mend that.\n" + agent.edit(wrong[0])
    return "I read the file first.\n" + agent.read()


def tools_of(text: str) -> dict[str, dict[str, Any]]:
    """Name -> tool, of those that a prompt names."""
    if not text.startswith("Tools: "):
        return {}
    tools, _ = json.JSONDecoder().raw_decode(text, len("Tools: "))
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def mended(wrong: str) -> str:
    """The line as it should be."""
    return wrong.replace("width + height", "width * height")


def as_text(wrong: str, prompt: str) -> str:
    """An edit for an agent that takes it as text: as blocks, or the whole file."""
    words = "It adds where it should multiply.\n"
    if WHOLE in prompt and (file := LISTED.search(prompt)):
        return "\n".join([words, FILE, "```", mended(file[1]) + "```\n"])
    lines = "<<<<<<< SEARCH", wrong, "=======", mended(wrong), ">>>>>>> REPLACE"
    return "\n".join([words, FILE, "```python", *lines, "```\n"])


class Agent:
    """Writes calls of the tools that there are. path: where the file is, by the task."""

    def __init__(self, tools: dict[str, dict[str, Any]], path: re.Match[str] | None) -> None:
        self.tools, self.path = tools, path[0] if path else FILE

    @property
    def takes_scripts(self) -> bool:
        """True for Codex's tool; OpenClaw's of this name is a shell."""
        parameters = self.tools.get(SCRIPTS, {}).get("parameters") or {}
        return SCRIPTS in self.tools and "command" not in (parameters.get("properties") or {})

    def read(self) -> str:
        """The call that reads the file."""
        name = self.first(READERS)
        return self.call(name) if name else self.run(f"cat {FILE}")

    def edit(self, wrong: str) -> str:
        """The call that mends it: by an editor, by a patch, or by a patch in a shell."""
        if name := self.first(EDITORS):
            return self.call(name, wrong)
        change = f"*** Update File: {FILE}", "@@", f"-{wrong}", f"+{mended(wrong)}"
        patch = "\n".join(["*** Begin Patch", *change, "*** End Patch", ""])
        if name := self.first(PATCHERS):
            return self.call(name, patch)
        if self.takes_scripts:
            return self.call(SCRIPTS, f"text(await tools.apply_patch({json.dumps(patch)}));")
        return self.run(f"apply_patch <<'EOF'\n{patch}EOF")

    def run(self, command: str) -> str:
        """The call that runs a command."""
        if self.takes_scripts:
            code = f"const done = await tools.exec_command({json.dumps({'cmd': command})});"
            return self.call(SCRIPTS, f"{code} text(done.output);")
        name = self.first(SHELLS)
        return self.call(name, command) if name else "There is no shell."

    def end(self, words: str) -> str:
        """The last answer, by a call where the client wants one."""
        name = self.first(ENDS)
        return self.call(name, words) if name else words

    def first(self, names: tuple[str, ...]) -> str | None:
        """The first of these names that is a tool's."""
        return next((name for name in names if name in self.tools), None)

    def call(self, name: str, text: str = "") -> str:
        """A call with its required arguments, and `text` for what it is about."""
        schema = self.tools[name].get("parameters") or {}
        call = {"name": name, "arguments": self.object(schema, text)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def object(self, schema: dict[str, Any], text: str) -> dict[str, Any]:
        """The required properties, and what an edit replaces."""
        properties = schema.get("properties") or {}
        replaced = (name for name in properties if name.startswith(("old", "new")))
        names = dict.fromkeys([*schema.get("required", []), *replaced])
        return {name: self.argument(name, properties.get(name) or {}, text) for name in names}

    def argument(self, name: str, schema: dict[str, Any], text: str) -> Any:
        """A value by its name and type."""
        plain, kind = name.lower().replace("_", ""), schema.get("type", "string")
        if kind == "array":
            items = schema.get("items") or {}
            if name == "command":
                return ["bash", "-lc", text]
            is_object = items.get("type") == "object"
            return [self.object(items, text) if is_object else text or self.path]
        if kind in VALUES:
            return VALUES[kind]
        if "path" in plain or plain in ("file", "filename"):
            return self.path
        return mended(text) if plain.startswith("new") else text or "as asked"
