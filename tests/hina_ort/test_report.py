"""`--html` and `--explain`: the page is whole, harmless and written at once; the words say where a pattern broke."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

import hina_ort
from graph_passes.explain import Place
from graph_passes.picture import Box, Drawing
from hina_ort.cli import app
from hina_ort.html_report import common_name, render
from hina_ort.inspection import explain_node, inspect_model
from tests.hina_ort import tiny

VOID = {"meta", "br", "hr", "img", "link", "input", "rect", "path"}


class Page(HTMLParser):
    """Tags of a page in their order, their attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"{self.open} not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data


def read(path: Path) -> Page:
    """A page that refers to nothing outside of itself and holds nothing that runs."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "use", "image", "base", "form")
        assert not any(name.startswith("on") or name in ("src", "style", "xlink:href") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in text and "@import" not in text and "://" not in text
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert str(policy).startswith("default-src 'none'")
    return page


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "400"})
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Three layers; the experts of the second have an unknown activation."""
    return tiny.save_model(tmp_path / "mixed.onnx", layers=3, unknown_layers=(1,))


def test_a_page_shows_each_block_before_and_after(model: Path, tmp_path: Path) -> None:
    target, file = tmp_path / "fused.onnx", tmp_path / "report.html"
    code, out, err = invoke("convert", model, target, "--html", file)
    assert (code, err) == (0, "") and f"wrote {file}" in out
    page = read(file)
    assert [tag for tag, _ in page.tags].count("section") == 1, "two layers that are alike share a section"
    assert "model.layers.0-1.mlp" in page.words and "model.layers.0.mlp" in page.words
    for words in ("fused", "HinaMoE", "TopK", "gate_up_proj", "norm_topk_prob", "before", "after", "9.0 KiB"):
        assert words in page.words
    boxes = [a["class"] for tag, a in page.tags if tag == "g"]
    assert {"router", "top-k", "experts", "combine", "output"} <= set(boxes)
    assert re.search(r"\d\.\de-0\d", page.words), "the error of the proof"
    assert any(a.get("name") == "viewport" for _, a in page.tags)
    assert "prefers-color-scheme:dark" in file.read_text()


def test_a_page_of_a_refusal_marks_the_node(mixed: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    code, _, _ = invoke("convert", mixed, tmp_path / "fused.onnx", "--html", file, "--dry-run", "--quiet")
    assert code == 4 and not (tmp_path / "fused.onnx").exists()
    page = read(file)
    assert [a["class"] for tag, a in page.tags if tag == "g"].count("dispatch marked") == 1
    reason = inspect_model(mixed).blocks[1].reason
    assert str(reason) in page.words and "can be fused" in page.words and "not fused" in page.words
    assert "combine: a sum of 2 weighted outputs" in page.words
    assert f"hina-ort inspect {mixed} --explain model.layers.1/mlp/MatMul" in page.words
    code, out, _ = invoke("convert", mixed, tmp_path / "fused.onnx", "--html", file, "--partial", "--json")
    assert code == 4 and json.loads(out)["html"] == str(file)
    assert "model.layers.0,2.mlp" in read(file).words


def test_inspect_makes_a_page_too(mixed: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.htm"
    code, out, _ = invoke("inspect", mixed, "--html", file, "--quiet")
    assert (code, out) == (0, "")
    assert "recognised, not proven" in read(file).words
    hina_ort.convert(mixed, tmp_path / "fused.onnx", partial=True)
    assert json.loads(invoke("inspect", tmp_path / "fused.onnx", "--html", file, "--json")[1])["blocks"]
    page = read(file)
    assert "model.layers.0,2.mlp/HinaMoE" in page.words and "router_weight" in page.words
    dense = tiny.save_model(tmp_path / "dense.onnx", dense=True)
    assert invoke("convert", dense, tmp_path / "none.onnx", "--html", file)[0] == 3
    assert "No MoE block" in read(file).words


def test_the_same_model_gives_the_same_page(mixed: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    pages = []
    for _ in range(2):
        invoke("convert", mixed, tmp_path / "fused.onnx", "--dry-run", "--html", file)
        pages.append(file.read_bytes())
    assert pages[0] == pages[1]


def test_names_are_words_and_nothing_else(model: Path, tmp_path: Path) -> None:
    proto = onnx.load(model)
    evil = "<script>alert(1)</script>\u202e\"'&\x07"
    for node in proto.graph.node:
        node.name = evil + node.name
    inner = next(i for n in proto.graph.node if n.op_type == "TopK" for i in n.input)
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [evil if name == inner else name for name in names]
    for info in [*proto.graph.value_info]:
        info.name = evil if info.name == inner else info.name
    path, file = tmp_path / "evil.onnx", tmp_path / "page.html"
    onnx.save(proto, path)
    assert invoke("convert", path, tmp_path / "out.onnx", "--html", file)[0] == 0
    text = file.read_text()
    assert "<script" not in text and "\u202e" not in text and "\x07" not in text
    read(file)
    place = Place(evil, "refused", evil, [evil], evil, note=evil, before=Drawing((Box(evil, evil, "input"),), (), {}))
    file.write_text(render(evil, [(evil, evil)], [place]))
    page = read(file)
    assert "<script>alert(1)</script>\ufffd\"'&" in page.words


def test_many_alike_layers_make_a_small_page() -> None:
    boxes = tuple(Box("MatMul", f"weight{i}", "experts", 128, i) for i in range(40))
    drawing = Drawing(boxes, tuple((i, i + 1) for i in range(39)), {"experts": {"MatMul": 5120}})
    alike = [
        Place(f"model.layers.{n}.mlp", "refused", "loop", reason=f"node {n} broke", before=drawing) for n in range(48)
    ]
    page = render("m.onnx", [], alike)
    assert page.count("<svg") == 2 and "model.layers.0-47.mlp" in page and "node 47 broke" in page
    other = [
        Place(f"layer {chr(n)}", "refused", reason=f"reason {chr(n)}", before=drawing) for n in range(19968, 20868)
    ]
    assert len(render("m.onnx", [], other)) < 2 << 20, "pictures end somewhere"


def test_refused_blocks_that_differ_in_names_share_a_section(tmp_path: Path) -> None:
    """Whatever the nodes around the place where the pattern broke are called."""
    model = onnx.load(tiny.save_model(tmp_path / "model.onnx", unknown_layers=(0, 1)))
    names = {node.name: f"{chr(97 + i % 26)}{'x' * i}/{node.op_type}" for i, node in enumerate(model.graph.node)}
    for node in model.graph.node:
        node.name = names[node.name]
    onnx.save(model, tmp_path / "model.onnx")
    file = tmp_path / "page.html"
    assert invoke("convert", tmp_path / "model.onnx", tmp_path / "out.onnx", "--html", file)[0] == 4
    page = read(file)
    assert [tag for tag, _ in page.tags].count("section") == 1
    assert all(str(block.node) in page.words for block in inspect_model(tmp_path / "model.onnx").blocks)
    inputs = [Drawing((Box("MatMul", "", "dispatch", marked=True), Box(op, "", "dispatch")), (), {}) for op in "ab"]
    different = [Place(f"b{i}", "refused", reason="odd", before=drawing) for i, drawing in enumerate(inputs)]
    assert render("m.onnx", [], different).count("<section") == 2


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["a.0.b"], "a.0.b"),
        ([f"a.{n}.b" for n in range(12)], "a.0-11.b"),
        (["a.1.b", "a.3.b", "a.4.b"], "a.1,3-4.b"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0 and 1 more"),
        (["x", "y"], "x and 1 more"),
        (["a.0", "a.0"], "a.0 and 1 more"),
    ],
)
def test_names_of_alike_blocks_become_one(names: list[str], common: str) -> None:
    assert common_name(names) == common


def test_where_a_page_cannot_be_written(model: Path, exported: Path, tmp_path: Path) -> None:
    page_model = tiny.save_model(tmp_path / "model.html")
    (tmp_path / "folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for source, file, words in (
        (model, tmp_path / "no" / "page.html", "there is no folder"),
        (model, tmp_path / "page.txt", "ends in .html"),
        (model, model, "is the model"),
        (page_model, page_model, "is the model"),
        (model, tmp_path / "out.onnx", "is the model"),
        (model, tmp_path / "folder.html", "is a folder"),
        (exported / "model.onnx", exported / "model.onnx_data", "ends in .html"),
    ):
        code, out, err = invoke("convert", source, tmp_path / "out.onnx", "--html", file)
        assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1
    for file, words in ((model, "is the model"), (tmp_path / "no" / "page.html", "there is no folder")):
        code, _, err = invoke("inspect", model, "--html", file)
        assert code == 2 and words in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_page_that_fails_leaves_no_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "page.html"
    old.write_text("old")
    before = sorted(tmp_path.rglob("*"))
    full = OSError(28, "No space left on device", str(old))
    for error, code, words in ((full, 1, f"{old} cannot be used: No space"), (KeyboardInterrupt(), 130, "interrupted")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("hina_ort.html_report.os.replace", fail)
            found, _, err = invoke("inspect", model, "--html", old)
            assert found == code and words in err
        with monkeypatch.context() as patch:
            patch.setattr("hina_ort.html_report.write", fail)
            found, _, err = invoke("convert", model, tmp_path / "out.onnx", "--html", old)
            assert found == code and words in err
    assert sorted(tmp_path.rglob("*")) == before and old.read_text() == "old"


def test_explain_in_words_and_as_json(mixed: Path) -> None:
    refused = inspect_model(mixed).blocks[1]
    code, out, err = invoke("inspect", mixed, "--explain", refused.node)
    assert (code, err) == (0, "")
    for words in (
        "refused (batched_mm)",
        str(refused.reason),
        "where it broke: MatMul",
        "recognised combine",
        "reads ",
    ):
        assert words in out
    assert re.search(r"reads \S+: float32 \[.*, 24, 16\] from GatherND", out)
    code, out, _ = invoke("inspect", mixed, "--explain", "layers.0.mlp", "--json")
    found = json.loads(out)
    assert set(found) == {"asked", "nodes", "distance", "places", "patterns"}
    (place,) = found["places"]
    keys = {"node", "state", "family", "steps", "reason", "spec", "note", "constants", "weights", "proof", "broke_at"}
    assert set(place) == keys
    assert place["proof"]["proven"] and place["spec"]["num_experts"] == tiny.EXPERTS
    assert found == json.loads(json.dumps(explain_node(mixed, "layers.0.mlp").to_dict()))
    assert invoke("inspect", mixed, "--explain", "layers.0.mlp", "--quiet") == (0, "", "")


def test_what_cannot_be_explained(mixed: Path, tmp_path: Path) -> None:
    for asked, words in (
        ("mlp", "several modules: model.layers.0.mlp, model.layers.1.mlp, model.layers.2.mlp; name one"),
        ("model.layers.0/mlp/Softmax_4", "did you mean model.layers.0/mlp/Softmax_3"),
        ("nonsense", "lists the MoE blocks"),
    ):
        code, out, err = invoke("inspect", mixed, "--explain", asked, "--json")
        assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1
    code, _, err = invoke("inspect", mixed, "--explain", "logits", "--html", tmp_path / "page.html")
    assert code == 2 and "do not go together" in err and not (tmp_path / "page.html").exists()
    dense = tiny.save_model(tmp_path / "dense.onnx", dense=True)
    code, out, _ = invoke("inspect", dense, "--explain", "logits")
    assert code == 0 and "near no MoE block" in out and "unrolled_loop: " in out


def test_a_refusal_says_how_to_see_more(mixed: Path, tmp_path: Path) -> None:
    awkward = mixed.rename(tmp_path / "my model.onnx")
    for command in (("inspect", awkward), ("convert", awkward, tmp_path / "out.onnx")):
        _, out, _ = invoke(*command)
        hint = next(line for line in out.splitlines() if line.startswith("where its pattern broke: "))
        assert f"hina-ort inspect '{awkward}' --explain model.layers.1/mlp/MatMul" in hint


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    model = onnx.load(tiny.save_model(tmp_path / "model.onnx", unknown_layers=(0, 1)))
    for node in model.graph.node:
        node.name += "\x1b]0;title\x07\u202e"
    onnx.save(model, tmp_path / "model.onnx")
    commands = (["inspect"], ["inspect", "--explain", "logits"], ["convert", str(tmp_path / "out.onnx")])
    for command, *rest in commands:
        result = CliRunner().invoke(app, [command, str(tmp_path / "model.onnx"), *rest])
        assert "title" in result.stdout and not set("\x1b\x07\u202e") & set(result.stdout)
