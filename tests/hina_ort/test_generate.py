"""`hina-ort generate`: the loop over a cache, what ends it, what it prints and counts, and its errors."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner, Result

import hina_ort
from hina_ort.cli import app
from hina_ort.files import UsageError
from hina_ort.generation import command, decoder, show
from hina_ort.generation.command import run_generate
from hina_ort.generation.decoder import Decoder
from hina_ort.generation.experts import ExpertCounts
from hina_ort.generation.sampling import Sampler
from hina_ort.generation.tokens import Tokens
from tests.hina_ort import decoders, tiny

PROMPT = "w5 w9 w3 w40 w17"
IDS = [5, 9, 3, 40, 17]


def invoke(*arguments: object, **settings: Any) -> Result:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], env={"COLUMNS": "200"}, **settings)
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def expected(count: int, ids: list[int] | None = None, **kind: Any) -> list[int]:
    """Greedy tokens of a decoder of tests.hina_ort.decoders, each computed from the whole text."""
    tokens = list(ids or IDS)
    for _ in range(count):
        tokens.append(decoders.next_token(tokens, **kind))
    return tokens[-count:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return decoders.save_decoder(tmp_path / "decoder")


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A converted model of two MoE layers without a cache, its weights in a file of their own."""
    source = tmp_path / "exported"
    source.mkdir()
    tiny.save_model(source / "model.onnx", external=True)
    decoders.save_tokenizer(source, tiny.VOCABULARY)
    hina_ort.convert(source, tmp_path / "fused")
    return tmp_path / "fused"


def test_a_data_file_that_is_cut_off_is_named(moe: Path) -> None:
    data = moe / "model.onnx.data"
    os.truncate(data, data.stat().st_size - 64)
    result = invoke(moe, PROMPT)
    assert result.exit_code == 1 and data.name in result.stderr and "ONNX Runtime" not in result.stderr
    data.unlink()
    result = invoke(moe, PROMPT)
    assert result.exit_code == 1 and data.name in result.stderr and "ONNX Runtime" not in result.stderr


@pytest.mark.parametrize("positions", [0, 2, 3])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("state", [False, True])
def test_the_cache_carries_the_text(
    tmp_path: Path, positions: int, mask: bool, state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"positions": positions, "state": state}
    folder = decoders.save_decoder(tmp_path / "decoder", mask=mask, eos_token_id=None, **kind)
    wanted = expected(16, **kind)
    assert len(set(wanted)) > 4, "this text shows nothing"
    for size in (1024, 2):
        monkeypatch.setattr(decoder, "PIECE", size)
        assert run_generate(folder, PROMPT, max_new_tokens=16).made.tokens == wanted
    runs = Decoder(folder / "model.onnx", str(folder / "model.onnx"), hina_ort.session_options())
    assert runs.has_cache
    monkeypatch.setattr(runs, "_run", lambda tokens, also: (len(tokens), []))
    assert runs.read(IDS)[0] == (5 if state else 1)  # a state of fixed size is not carried from piece to piece


@pytest.mark.parametrize("logits", ["FLOAT16", "BFLOAT16", "DOUBLE"])
def test_other_types_of_logits(tmp_path: Path, logits: str) -> None:
    folder = decoders.save_decoder(tmp_path / "decoder", logits=logits)
    assert run_generate(folder, PROMPT, max_new_tokens=1).made.tokens == expected(1)


def test_the_text_comes_on_stdout_and_the_rest_on_stderr(folder: Path) -> None:
    words = " ".join(f"w{token}" for token in expected(6))
    result = invoke(folder, PROMPT, "--max-new-tokens", "6")
    assert (result.exit_code, result.stdout.split()) == (0, words.split())
    assert "prefill: 5 tokens" in result.stderr and "decode: 5 tokens" in result.stderr
    assert result.stderr.count("tokens/s") == 2 and "--max-new-tokens reached" in result.stderr
    quiet = invoke(folder, "--prompt-file", "-", "--max-new-tokens", "6", "--quiet", input=f"{PROMPT}\n")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")
    path = folder / "prompt.txt"
    path.write_text(PROMPT)
    found = json.loads(invoke(folder / "model.onnx", "--prompt-file", path, "--max-new-tokens", "6", "--json").stdout)
    assert found["tokens"] == expected(6) and found["text"].split() == words.split()
    assert (found["finish"], found["seed"], found["experts"]) == ("length", None, None)
    assert (found["prefill"]["tokens"], found["decode"]["tokens"]) == (5, 5)
    for speed in (found["prefill"], found["decode"]):
        assert speed["tokens_per_second"] == pytest.approx(speed["tokens"] / speed["seconds"])


def test_a_terminal_is_not_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\u202ec\n\t\u3000\u0646\u200c\u0647"
    for is_terminal in (True, False):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda answer=is_terminal: answer)
        monkeypatch.setattr(sys, "stdout", out)
        show.write(text)
        shown = text.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd") if is_terminal else text
        assert out.getvalue() == shown


@pytest.mark.parametrize(
    "where", ["generation_config.json", "config.json", "genai_config.json", "tokenizer_config.json"]
)
def test_the_text_ends_at_a_token_that_ends_it(folder: Path, where: str) -> None:
    tokens = expected(12)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    for name in ("generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
    values: Any = {"eos_token_id": [63, end] if where == "generation_config.json" else end}
    if where == "genai_config.json":
        values = {"model": values}
    if where == "tokenizer_config.json":
        values = {"eos_token": {"content": f"w{end}"}}
    (folder / where).write_text(json.dumps(values))
    report = run_generate(folder, PROMPT)
    assert (report.finish, report.made.tokens) == ("stop", tokens[: tokens.index(end)])
    assert "the text ended" in invoke(folder, PROMPT).stderr


def test_the_text_ends_where_the_model_takes_no_more(tmp_path: Path) -> None:
    config = {"eos_token_id": None, "text_config": {"max_position_embeddings": 8}}
    folder = decoders.save_decoder(tmp_path / "decoder", **config)
    report = run_generate(folder, PROMPT)
    assert (report.finish, report.made.tokens) == ("context", expected(3))
    assert run_generate(folder, PROMPT, max_new_tokens=3).finish == "length"
    result = invoke(folder, "w1 w2 w3 w4 w5 w6 w7 w8")
    assert result.exit_code == 2 and "the prompt has 8 tokens, and the model takes 8 with the answer" in result.stderr


@pytest.mark.parametrize("length", [0, -5, True, "many"])
def test_a_length_that_is_none_does_not_end_the_text(tmp_path: Path, length: object) -> None:
    folder = decoders.save_decoder(tmp_path / "decoder", max_position_embeddings=length, n_positions=8)
    assert Tokens.read(folder / "model.onnx").context == 8


def test_streams_may_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input, which is closed"):
        run_generate(folder, None, prompt_file=Path("-"))
    monkeypatch.setattr(sys, "stdout", None)
    show.write("lost")


def test_samples_repeat_with_their_seed(folder: Path) -> None:
    def sample(*more: str) -> dict[str, Any]:
        options = ["--temperature", "2", "--max-new-tokens", "12", "--json"]
        found: dict[str, Any] = json.loads(invoke(folder, PROMPT, *options, *more).stdout)
        return found

    first = sample("--seed", "7")
    assert first["seed"] == 7 and sample("--seed", "7")["tokens"] == first["tokens"]
    assert sample("--seed", "8")["tokens"] != first["tokens"]
    drawn = sample()
    assert sample("--seed", str(drawn["seed"]))["tokens"] == drawn["tokens"]
    assert sample("--top-k", "1")["tokens"] == expected(12)


def test_ctrl_c_leaves_the_text_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, left = Sampler.choose, iter(range(3))

    def interrupted(self: Sampler, logits: Any) -> int:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return choose(self, logits)

    monkeypatch.setattr(Sampler, "choose", interrupted)
    result = invoke(folder, PROMPT)
    assert result.exit_code == 130 and result.stdout.split() == [f"w{token}" for token in expected(3)]
    assert "interrupted" in result.stderr and "nothing was written" not in result.stderr


def test_a_model_without_a_cache_reads_the_text_again_and_says_so(moe: Path) -> None:
    def greedy(path: Path, count: int) -> list[int]:
        runs = onnxruntime.InferenceSession(str(path / "model.onnx"), hina_ort.session_options())
        tokens = list(range(2, 6))
        for _ in range(count):
            tokens.append(int(np.argmax(runs.run(["logits"], {"input_ids": np.array([tokens])})[0][0, -1])))
        return tokens[4:]

    result = invoke(moe, "w2 w3 w4 w5", "--max-new-tokens", "6")
    assert result.stdout.split() == [f"w{token}" for token in greedy(moe, 6)]
    assert "has no cache of keys and values" in result.stderr
    assert invoke(moe, "w2 w3 w4 w5", "--quiet").stderr == ""


def linked(folder: Path) -> Path:
    """`folder` as a Hugging Face cache has it: links to files elsewhere."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "0"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def split(folder: Path) -> Path:
    """`folder` with its weights in files of two folders below it."""
    model = onnx.load(folder / "model.onnx")
    for number, tensor in enumerate(model.graph.initializer):
        place = Path(f"part{number % 2}") / f"{number}.data"
        onnx.external_data_helper.set_external_data(tensor, str(place))
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


@pytest.mark.parametrize("place", [lambda folder: folder, linked, split])
def test_experts_are_counted_without_touching_the_model(moe: Path, place: Callable[[Path], Path]) -> None:
    pytest.importorskip("matplotlib")
    moe = place(moe)
    before = {path: path.read_bytes() for path in moe.rglob("*") if path.is_file()}
    heatmap = moe.parent / "experts.png"
    found = json.loads(
        invoke(moe, PROMPT, "--max-new-tokens", "4", "--json", "--experts-stats", "--heatmap", heatmap).stdout
    )
    plain = json.loads(invoke(moe, PROMPT, "--max-new-tokens", "4", "--json").stdout)
    assert found["tokens"] == plain["tokens"]
    read = 5 + 6 + 7 + 8  # there is no cache: each token reads the whole text
    assert [layer["layer"] for layer in found["experts"]] == ["layers.0", "layers.1"]
    for layer in found["experts"]:
        assert len(layer["tokens_per_expert"]) == tiny.EXPERTS
        assert sum(layer["tokens_per_expert"]) == read * tiny.TOP_K
    assert heatmap.read_bytes().startswith(b"\x89PNG")
    assert before == {path: path.read_bytes() for path in moe.rglob("*") if path.is_file()}
    table = invoke(moe, PROMPT, "--max-new-tokens", "4", "--experts-stats").stderr
    assert "layers.1" in table and str(read * tiny.TOP_K) in table and "of 4" in table


def test_counts_that_cannot_be_had_are_refused(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.20.1")
    assert "--experts-stats needs ONNX Runtime 1.21 or later" in invoke(moe, PROMPT, "--experts-stats").stderr


def test_the_table_of_experts() -> None:
    name, total, used, least, median, most, busiest = ExpertCounts(["layers.3"], [[0, 6, 1, 3]]).rows()[0]
    assert (name, total, used, least, median, most) == ("layers.3", "10", "3 of 4", "0", "2", "6")
    assert busiest == "1: 60.0%, 3: 30.0%, 2: 10.0%, 0: 0.0%"


def test_the_chat_template_is_applied(folder: Path) -> None:
    pytest.importorskip("jinja2")
    template = "{% for m in messages %}w7 {{ m['content'] }} {{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %} w8{% endif %}"
    config = {"chat_template": template, "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    report = run_generate(folder, "w5 w9", chat=True, max_new_tokens=4)
    assert (report.prompt_tokens, report.made.tokens) == (5, expected(4, [7, 5, 9, 1, 8]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ raise_exception('no') }}"}))
    assert "the chat template in" in invoke(folder, "w5", "--chat").stderr


def no_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").unlink()
    return [PROMPT]


def broken_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").write_text("{}")
    return [PROMPT]


def broken_config(folder: Path) -> list[str]:
    (folder / "config.json").write_text("{")
    return [PROMPT]


def no_language_model(folder: Path) -> list[str]:
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["ids_in" if name == "input_ids" else name for name in node.input]
    model.graph.input[0].name = "ids_in"
    onnx.save(model, folder / "model.onnx")
    return [PROMPT]


def unknown_input(folder: Path) -> list[str]:
    model = onnx.load(folder / "model.onnx")
    model.graph.input.append(onnx.helper.make_tensor_value_info("pixel_values", onnx.TensorProto.FLOAT, [1]))
    onnx.save(model, folder / "model.onnx")
    return [PROMPT]


def not_a_number(folder: Path) -> list[str]:
    model = onnx.load(folder / "model.onnx")
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    head.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(head) * np.float32("nan"), "head"))
    onnx.save(model, folder / "model.onnx")
    return [PROMPT]


def stray_token(folder: Path) -> list[str]:
    decoders.save_tokenizer(folder, 2000)
    return ["w1999"]


def no_unknown_token(folder: Path) -> list[str]:
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {"w1": 1}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return ["w2"]


def latin_prompt(folder: Path) -> list[str]:
    (folder / "prompt.txt").write_bytes("Kälte".encode("latin-1"))
    return ["--prompt-file", str(folder / "prompt.txt")]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (no_tokenizer, 1, "holds no tokenizer.json; put the tokenizer of the model's checkpoint there"),
        (broken_tokenizer, 1, "is no tokenizer"),
        (broken_config, 1, "config.json is no JSON"),
        (no_language_model, 1, "is no language model: it has the inputs ids_in, "),
        (unknown_input, 1, "has the input pixel_values of type tensor(float), which generate cannot give"),
        (not_a_number, 1, "computes NaN or infinite logits"),
        (stray_token, 1, "fails at token 1999, and has a vocabulary of 64: is the tokenizer that of another model?"),
        (no_unknown_token, 1, "tokenizer.json cannot split the prompt (WordLevel error"),
        (["\udcff"], 2, "the prompt is no text in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        (latin_prompt, 2, "is no text in UTF-8"),
        ([""], 2, "the prompt is empty"),
        (["  "], 2, "makes no token of the prompt"),
        ([], 2, "give one prompt"),
        ([PROMPT, "--prompt-file", "-"], 2, "give one prompt"),
        ([PROMPT, "--max-new-tokens", "0"], 2, "--max-new-tokens is 0"),
        ([PROMPT, "--threads", "0"], 2, "--threads is 0"),
        ([PROMPT, "--threads", "100000"], 2, "--threads is 100000, expected "),
        ([PROMPT, "--temperature", "-1"], 2, "--temperature is -1"),
        ([PROMPT, "--temperature", "nan"], 2, "--temperature is nan"),
        ([PROMPT, "--temperature", "1", "--top-p", "0"], 2, "--top-p is 0"),
        ([PROMPT, "--temperature", "1", "--top-k", "0"], 2, "--top-k is 0"),
        ([PROMPT, "--temperature", "1", "--seed", "-1"], 2, "--seed is -1"),
        ([PROMPT, "--top-k", "5"], 2, "--top-k needs --temperature above 0"),
        ([PROMPT, "--heatmap", "x.png"], 2, "--heatmap needs --experts-stats"),
        ([PROMPT, "--experts-stats"], 1, "holds no HinaMoE node; convert it first"),
        ([PROMPT, "--experts-stats", "--heatmap", "/none/x.png"], 2, "there is no folder /none"),
        ([PROMPT, "--chat"], 1, "holds no chat template; leave out --chat"),
    ],
)
def test_errors_are_one_sentence(
    folder: Path, arguments: list[str] | Callable[[Path], list[str]], code: int, words: str
) -> None:
    result = invoke(folder, *(arguments(folder) if callable(arguments) else arguments))
    lines = result.stderr.strip().splitlines()
    assert (result.exit_code, result.stdout, len(lines)) == (code, "", 1), result.stderr
    assert lines[0].startswith("error: ") and words in lines[0]


@pytest.mark.parametrize(("name", "options"), [("matplotlib", ["--experts-stats", "--heatmap", "x.png"]),
                                               ("jinja2.sandbox", ["--chat"])])  # fmt: skip
def test_a_missing_package_is_named(
    folder: Path, name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "chat_template.jinja").write_text("w1")
    monkeypatch.setitem(sys.modules, name, None)
    result = invoke(folder, PROMPT, *options)
    assert result.exit_code == 2 and f"needs {name.partition('.')[0]}: pip install" in result.stderr


def test_a_model_in_the_folder_onnx_has_its_tokenizer_above(folder: Path) -> None:
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model.onnx")
    assert run_generate(folder / "onnx", PROMPT, max_new_tokens=2).made.tokens == expected(2)
    assert Tokens.read(folder / "onnx" / "model.onnx").stop == {decoders.END}


def test_threads_are_those_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Spy(Decoder):
        def __init__(self, source: Path, model: str | bytes, options: Any, most: int) -> None:
            asked.append((options.intra_op_num_threads, most))
            super().__init__(source, model, options, most)

    monkeypatch.setattr(command, "Decoder", Spy)
    monkeypatch.setattr(command, "usable_cpus", lambda: 2)
    run_generate(folder, PROMPT, max_new_tokens=1, threads=1)
    run_generate(folder, PROMPT, max_new_tokens=1)
    assert asked == [(1, 6), (2, 6)]
