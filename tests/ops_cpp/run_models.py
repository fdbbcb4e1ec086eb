"""Run the models of a folder one after the other: `python -m tests.ops_cpp.run_models FOLDER`.

For each `NAME.onnx` with its `NAME.npz` of inputs one line of JSON comes before it starts and one after it ended, so
that the reader knows which model a crash belongs to. Inputs lie at odd addresses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests import node as harness
from tests.tensors import misaligned


def outcome(path: Path) -> dict[str, str]:
    """The stage a model got to ("session", "run" or "done") and the error that ended it there."""
    stage = "session"
    try:
        session = harness.make_session(path)
        stage = "run"
        harness.run(session, {name: misaligned(v) for name, v in np.load(path.with_suffix(".npz")).items()})
    except Exception as error:
        return {"stage": stage, "type": type(error).__name__, "message": str(error)}
    return {"stage": "done", "type": "", "message": ""}


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        print(json.dumps({"started": path.stem}), flush=True)
        print(json.dumps({"ended": path.stem, **outcome(path)}), flush=True)


if __name__ == "__main__":
    main()
