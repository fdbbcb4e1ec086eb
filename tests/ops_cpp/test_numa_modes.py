"""HINA_NUMA and the session config entry hina.numa: which mode a node of a model takes, and what it says about it."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from hina_ort.runtime import query
from tests import node as harness

ONE_NODE = len(query("topology")["workers"]) == 1
MODES = ("off", "auto", "interleave", "bind", "copy")
EXPECTED_MODES = "expected one of: off auto interleave bind copy"


@pytest.fixture
def node() -> harness.Node:
    return harness.random_node(harness.make_spec(shared_intermediate_size=20), np.random.default_rng(3))


def session(node: harness.Node, entry: str | None = None) -> ort.InferenceSession:
    return harness.make_session(harness.make_model(node), config={} if entry is None else {"hina.numa": entry})


@pytest.mark.parametrize("by_variable", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_values(
    mode: str,
    by_variable: bool,
    node: harness.Node,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HINA_NUMA", raising=False)
    feeds = harness.random_feeds(node, np.random.default_rng(4), (7,))
    monkeypatch.setenv("HINA_VERBOSE", "1")
    if by_variable:
        monkeypatch.setenv("HINA_NUMA", mode)
    capfd.readouterr()
    chosen = session(node, None if by_variable else mode)
    for _ in range(3):
        harness.assert_right(node, feeds, harness.run(chosen, feeds))
    said = capfd.readouterr().err
    if mode == "off":
        assert said.count("; numa off because it was asked for; isa ") == said.count("numa") == 1
    elif ONE_NODE:
        assert said.count("; numa off because this process may run on one node alone; isa ") == said.count("numa") == 1
    else:
        assert f"numa {mode} on nodes " in said or "numa off because " in said


def test_nothing_is_said_unless_asked_for(
    node: harness.Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HINA_VERBOSE", raising=False)
    monkeypatch.setenv("HINA_NUMA", "auto")
    harness.run(session(node), harness.random_feeds(node, np.random.default_rng(4), (7,)))
    assert "hina" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variable", "entry"), [("off", "interleave"), ("", "off")], ids=["it wins", "empty: not asked"]
)
def test_the_variable_before_the_entry(
    variable: str, entry: str, node: harness.Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HINA_VERBOSE", "1")
    monkeypatch.setenv("HINA_NUMA", variable)
    session(node, entry)
    assert "numa off because it was asked for" in capfd.readouterr().err


def test_a_variable_that_is_no_mode(node: harness.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINA_NUMA", "Auto")
    with pytest.raises(Exception, match=f"HinaMoE node 'moe': HINA_NUMA is 'Auto', {EXPECTED_MODES}") as caught:
        session(node)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("word", ["both", "", "off "])
def test_an_entry_that_is_no_mode(word: str, node: harness.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HINA_NUMA", raising=False)
    with pytest.raises(Exception, match=f"the session config entry hina.numa is '{word}', {EXPECTED_MODES}"):
        session(node, word)


def test_sessions_of_one_process_may_differ(
    node: harness.Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HINA_NUMA", raising=False)
    monkeypatch.setenv("HINA_VERBOSE", "1")
    for entry in ("off", None, "off", "copy"):
        session(node, entry)
        assert ("it was asked for" in capfd.readouterr().err) == (entry == "off")
