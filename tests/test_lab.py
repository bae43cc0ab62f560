"""The pair that ships: it loads, it fits, it agrees, and its script runs."""

from __future__ import annotations

import socket
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.lab import byte_tokens, pack, train
from selection import FULL, cases
from specdec_mlx import ModelDrafter, Sampling, lab, speculate
from specdec_mlx.bench.prompts import read_prompts
from specdec_mlx.drafters.tokenizers import SAMPLES, check_same_tokenizer
from specdec_mlx.lab import __main__ as command
from specdec_mlx.lab import pair as pair_module
from specdec_mlx.lab.pair import WEIGHTS, unpack
from specdec_mlx.loop import Token
from specdec_mlx.training import fitting

LARGEST = 5_200_000  # bytes; the whole package is to have at most 6 MB
LARGEST_HEADS = 1_100_000
LEAST_ACCEPTANCE = {"mtp": 0.7, "eagle3": 0.4, "medusa": 0.2, "exit": 0.3}
"""By head, on one text; the model card has them on all that was held out."""

HELD_OUT_PROMPT = """\
Function calls
**************

A call calls a callable object (e.g., a *function*) with a possibly
empty series of *arguments*:
"""  # the held-out topic "calls"; other Pythons may carry other words, this test does not


@pytest.fixture(scope="module")
def pair() -> lab.Pair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", pytest.fail)
        return lab.load_pair()


@pytest.fixture(scope="module")
def prompt(pair: lab.Pair) -> list[int]:
    return pair.tokenizer.encode(HELD_OUT_PROMPT)


@pytest.fixture(scope="module")
def plain(pair: lab.Pair, prompt: list[int]) -> list[int]:
    """The target's own greedy text."""
    return [token for token, _ in generate_step(mx.array(prompt), pair.target, max_tokens=160)]


def acceptance(tokens: list[Token]) -> float:
    """Accepted draft tokens per draft token that the rule came to look at."""
    origins = [token.origin for token in tokens]
    return origins.count("draft") / (origins.count("draft") + origins.count("correction"))


def test_shapes_and_dtype(pair: lab.Pair) -> None:
    sizes = []
    for model, shape in [(pair.target, train.TARGET_SHAPE), (pair.draft, train.DRAFT_SHAPE)]:
        assert {name: getattr(model.args, name) for name in shape} == shape
        assert model.args.vocab_size == len(pair.tokenizer.get_vocab()) == byte_tokens.VOCAB_SIZE
        weights = [weight for _, weight in tree_flatten(model.parameters())]
        assert {weight.dtype for weight in weights} == {mx.float32}
        sizes.append(sum(weight.size for weight in weights))
    assert 2.5e6 < sizes[0] < 4e6
    assert sizes[1] < sizes[0] / 9  # about a tenth


def test_fits_into_the_package() -> None:
    """The heads at most 1.1 MB, and nothing of their training beside them."""
    folder = Path(lab.__file__).parent
    files = [f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(file.stat().st_size for file in files) < LARGEST
    heads = [file for file in files if folder / "heads" in file.parents]
    assert {file.name for file in heads} == {"config.json", "model.safetensors"}
    assert len(heads) == 2 * len(lab.HEADS)
    assert sum(file.stat().st_size for file in heads) <= LARGEST_HEADS


def test_what_is_packed_is_read_back_in_float32(tmp_path: Path) -> None:
    """To half a step of its row's scale; what is no matrix, as it was; a row of zeros too."""
    (tmp_path / "m").mkdir()
    matrix = mx.random.normal((4, 5), key=mx.random.key(0)) * mx.array([[1], [9], [0], [0.1]])
    stored = {"a": matrix, "b": mx.arange(3), "c": mx.ones(2), "d": matrix[None]}
    mx.save_safetensors(str(tmp_path / "m" / "model.safetensors"), stored)
    pack.pack(tmp_path / "m", tmp_path / "packed")
    packed = mx.load(str(tmp_path / "packed" / WEIGHTS))
    assert {weight.dtype for weight in packed.values()} == {mx.int8, mx.float32, mx.int32}
    read = mx.load(str(unpack(tmp_path / "packed", tmp_path / "full") / "model.safetensors"))
    assert all(mx.array_equal(read[name], stored[name]) for name in ("b", "c"))
    half_step = mx.max(mx.abs(matrix), axis=1, keepdims=True) / 254
    for found in (read["a"], read["d"][0]):
        assert mx.all(mx.abs(found - matrix) <= half_step * 1.001)


def test_where_the_cache_cannot_be_written_the_pair_loads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder of this process, which is made once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "file"))
    folder = lab.draft_path()
    assert tmp_path not in folder.parents
    written = (folder / WEIGHTS).stat().st_mtime_ns
    assert lab.draft_path() == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == written


def test_both_have_the_same_tokenizer_in_which_a_text_is_its_bytes(pair: lab.Pair) -> None:
    """Bytes with the characters of other byte-level vocabularies, and one end of text."""
    for text in [*SAMPLES, "\r\n\t\x00\xa0", " 's n't , .", ""]:
        tokens = pair.tokenizer.encode(text, add_special_tokens=False)
        assert tokens == list(text.encode())
        assert pair.tokenizer.decode(tokens) == text
    check_same_tokenizer(pair.tokenizer, mlx_lm.load(str(lab.draft_path()))[1])
    end = byte_tokens.END_OF_TEXT_ID
    assert pair.tokenizer.eos_token_ids == {end}
    assert not pair.tokenizer.has_chat_template
    assert pair.tokenizer.encode(f"a{byte_tokens.END_OF_TEXT}b") == [97, end, 98]
    assert sorted(byte_tokens.byte_characters().values()) == sorted(ByteLevel.alphabet())


@pytest.mark.parametrize("draft_length", cases([4, "auto"], 4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_and_greedy_text_is_the_targets_own(
    temperature: float,
    draft_length: int | str,
    pair: lab.Pair,
    prompt: list[int],
    plain: list[int],
) -> None:
    options = {"max_tokens": 160, "sampler": Sampling(temperature), "seed": 1}
    drafter = ModelDrafter(pair.draft)
    drafted = speculate(pair.target, prompt, drafter, draft_length=draft_length, **options)
    tokens = list(drafted)
    assert temperature > 0 or [token.token for token in tokens] == plain
    if draft_length == 4:
        assert acceptance(tokens) > 0.6
        assert tokens[-1].stats.tokens_per_pass > 2


@FULL
def test_knows_its_language(pair: lab.Pair, prompt: list[int], plain: list[int]) -> None:
    """The continuation is words, and much likelier than bytes at random (8 bits)."""
    text = pair.tokenizer.decode(plain)
    assert text.isprintable() or "\n" in text
    measured = train.agreement(pair.target, pair.draft, np.array(prompt), 64)
    assert measured.target_bits_per_byte < 2.5
    assert measured.acceptance > 0.6


def test_held_out_topics_are_not_trained_on() -> None:
    trained, held_out = pair_module.split_topics()
    known = {paragraph for text in trained for paragraph in text.split("\n\n")}
    paragraphs = [p for text in held_out for p in text.split("\n\n")]
    assert not [p for p in paragraphs if len(p) >= pair_module.SHORTEST_QUOTE and p in known]
    assert 0.03 < len(byte_tokens.to_stream(held_out)) / len(byte_tokens.to_stream(trained)) < 0.1


def test_the_parts_of_a_training() -> None:
    """A model agrees with itself, windows lengthen at the end, and rates rise and fall."""
    model = train.build(train.DRAFT_SHAPE)
    measured = train.agreement(model, model, np.arange(100) % byte_tokens.VOCAB_SIZE, 32)
    assert measured.greedy == 1
    assert measured.acceptance == pytest.approx(1, abs=1e-5)
    assert measured.target_bits_per_byte == measured.draft_bits_per_byte
    assert measured.num_positions == 16 * len(range(0, 100 - 32, 16))
    plan = train.Plan(batch=4, window=8)
    streams = [np.arange(1000, dtype=np.int32), np.arange(1000, 2000, dtype=np.int32)]
    shapes = [b.shape for b in train.lengthening(streams, 10, plan, np.random.default_rng(0))]
    assert shapes == [(4, 8)] * 8 + [(1, 32)] * 2
    rates = [fitting.rates(2.0, 100)(mx.array(step, mx.uint64)).item() for step in range(100)]
    assert np.argmax(rates) == 4
    assert rates[4] == pytest.approx(2)
    assert np.all(np.diff(rates[:5]) > 0)
    assert np.all(np.diff(rates[5:]) < 0)
    assert 0 <= rates[-1] < 0.01


def test_the_script_runs_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of everything, twice: folders that mlx-lm loads, with the same weights."""
    monkeypatch.setattr(train, "TARGET_SHAPE", train.DRAFT_SHAPE)
    monkeypatch.setattr(pair_module, "split_topics", lambda: (["ab" * 500], ["abc " * 40]))
    options = "--steps 2 --draft-steps 2 --batch 2 --window 16 --samples 2 --sample-length 70"
    for run in ("a", "b"):
        train.main([*options.split(), "--out", str(tmp_path / run)])
        assert "acceptance: " in capsys.readouterr().out
    for name in ("target", "draft"):
        loaded = [mlx_lm.load(str(tmp_path / run / name)) for run in ("a", "b")]
        first, second = (dict(tree_flatten(model.parameters())) for model, _ in loaded)
        assert first.keys() == second.keys()
        assert all(mx.allclose(first[key], second[key], atol=1e-5) for key in first)
        model, tokenizer = loaded[0]
        assert tokenizer.eos_token_ids == {byte_tokens.END_OF_TEXT_ID}
        assert len(list(mlx_lm.stream_generate(model, tokenizer, "a", max_tokens=2))) <= 2


def test_the_command_prints_folders_and_prompts_that_the_benchmark_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of each held-out topic, and none of the text that was trained on."""

    def printed(which: str) -> str:
        monkeypatch.setattr("sys.argv", ["lab", which])
        command.main()
        return capsys.readouterr().out

    for which in ("target", "draft", *lab.HEADS):
        assert (Path(printed(which).strip()) / "config.json").is_file()
    (tmp_path / "prompts.jsonl").write_text(printed("prompts"))
    prompts = read_prompts(tmp_path / "prompts.jsonl")
    assert [p.category for p in prompts] == [t for t in pair_module.HELD_OUT for _ in range(2)]
    trained = "\n\n".join(pair_module.split_topics()[0])
    assert not any(p.text in trained for p in prompts)
    assert min(len(p.text) for p in prompts) == pair_module.OPENING_LENGTH


@pytest.mark.parametrize("kind", lab.HEADS)
def test_heads_are_lossless_and_worth_their_passes(
    kind: str, pair: lab.Pair, prompt: list[int], plain: list[int]
) -> None:
    """On a held-out topic: plain text, and more accepted than a head that guesses at random."""
    drafter = lab.head(kind, pair.target)
    tokens = list(speculate(pair.target, prompt, drafter, draft_length=2, max_tokens=120))
    assert [token.token for token in tokens] == plain[:120]
    assert acceptance(tokens) > LEAST_ACCEPTANCE[kind]


def test_a_head_that_the_lab_has_not_is_refused_by_name(pair: lab.Pair) -> None:
    with pytest.raises(ValueError, match="no head 'dflash': expected mtp, eagle3"):
        lab.head("dflash", pair.target)
