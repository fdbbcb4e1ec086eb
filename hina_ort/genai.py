"""Folders of onnxruntime-genai: which of their models is the decoder, and what they need to run HinaMoE.

genai_config.json names the models, and in `model.decoder.session_options.custom_ops_library` one library of operators;
onnxruntime-genai loads it only from inside the folder, and follows no link out of it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graph_passes import external_data
from graph_passes.external_data import ModelFileError
from graph_passes.matchers.match import Miss
from hina_ort.files import UsageError
from hina_ort.runtime import LIBRARY_NAME, get_library_path

CONFIG_NAME = "genai_config.json"
OPTION = "custom_ops_library"
_DEEPEST = 100
"""Objects and lists in each other; real configurations have six levels."""
_DROPPED = ("granitemoehybrid",)
"""Architectures that are built without their routed experts."""

Moved = Mapping[tuple[Path, int, int], ir.ExternalTensor]
"""The tensors of a model that was written, by the file, offset and bytes that they had in its source."""


@dataclass(frozen=True)
class GenaiFolder:
    """A folder that onnxruntime-genai can load: the `text` of its genai_config.json and the `values` in it."""

    folder: Path
    text: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> GenaiFolder:
        """Read the configuration in `folder`.

        Raises UsageError when `folder` is none, ModelFileError when there is no configuration, when it is no JSON or
        names no decoder, and when it names another library of operators, FileNotFoundError when ours is missing.
        """
        path = folder / CONFIG_NAME
        if not folder.is_dir():
            raise UsageError(f"--genai is for a folder with {CONFIG_NAME}, and SRC {folder} is no folder; name one")
        get_library_path()
        if not path.is_file():
            raise ModelFileError(
                f"{folder} holds no {CONFIG_NAME}; name a folder that the builder of onnxruntime-genai wrote, or leave "
                "out --genai"
            )
        try:
            text = path.read_bytes().decode()
            values = json.loads(text)
            deepest = _depth(values)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} is no JSON ({error}); correct it, or build the model again") from error
        if deepest > _DEEPEST:
            raise ModelFileError(f"{path} nests values {deepest} levels deep; correct it, or build the model again")
        found = cls(folder, text, values)
        name, library = found._decoder.get("filename"), found._options.get(OPTION)
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFileError(
                f"{path} names no model file beside it in model.decoder.filename; convert the model files one by one"
            )
        if not (folder / name).is_file():
            raise ModelFileError(f"{path} names the model {name!r}, which is not there; build the model again")
        if library is not None and Path(str(library)).name != LIBRARY_NAME:
            raise ModelFileError(
                f"{path} names {library} as {OPTION} already, and onnxruntime-genai loads one only; remove it if the "
                "model runs without"
            )
        return found

    @property
    def model_name(self) -> str:
        """The file name of the decoder."""
        name: str = self._decoder["filename"]
        return name

    @property
    def has_library(self) -> bool:
        """Whether the library of HinaMoE is named."""
        return self._options.get(OPTION) is not None

    @property
    def _decoder(self) -> Mapping[str, Any]:
        return _section(_section(self.values, "model"), "decoder")

    @property
    def _options(self) -> Mapping[str, Any]:
        return _section(self._decoder, "session_options")

    def complete(self, model: ir.Model, written: Path) -> list[str]:
        """Put what the decoder `model` needs beside the file `written` that it was saved to; say in words what.

        These are the library, a configuration that names it, and the other models that the configuration names. Those
        may share weights with the decoder, and do so afterwards.
        """
        moved = _moved(model, written)
        others = [name for name in sorted(_model_names(self.values)) if (self.folder / name).is_file()]
        others = [name for name in others if name != self.model_name]
        for name in others:
            _copy_model(self.folder / name, written.parent, moved)
        shutil.copyfile(get_library_path(), written.parent / LIBRARY_NAME)
        (written.parent / CONFIG_NAME).write_bytes(self._edited().encode())
        lines = [f"{LIBRARY_NAME} lies beside the model, and {CONFIG_NAME} names it"]
        return lines + [f"{name} was copied, and not converted" for name in others]

    def _edited(self) -> str:
        """The text of the configuration of the model that was written; what needs no change stays as it is.

        `shared_initializers` go: they are places in a data file of SRC, and for devices other than the CPU, where
        models that name one data file share it anyway (onnxruntime-genai 0.18 cannot load them there).
        """
        values: dict[str, Any] = copy.deepcopy(dict(self.values))
        values["model"]["decoder"]["session_options"] = {**self._options, OPTION: LIBRARY_NAME}
        for section in _sections(values):
            section.pop("shared_initializers", None)
        if values == self.values:
            return self.text
        for opening in re.finditer(r'"session_options"\s*:\s*\{(\s*)', self.text):
            at = opening.end()
            text = f'{self.text[:at]}"{OPTION}": "{LIBRARY_NAME}",{opening[1]}{self.text[at:]}'
            with suppress(ValueError):
                if json.loads(text) == values:
                    return text
        return json.dumps(values, indent=4)


def axis_sizes(folder: Path) -> dict[str, int]:
    """The sizes of axes that the builder leaves symbolic and that are fixed all the same; none for other folders."""
    with suppress(OSError, ValueError, RecursionError):
        size = _section(_model_of(folder), "decoder").get("head_size")
        if isinstance(size, int) and size > 0:
            return {"kv_cache_dim": size}
    return {}


def shares_cache(folder: Path) -> bool:
    """Whether the decoder in `folder` may write its cache where it read it, in buffers as long as the whole text."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads((folder / CONFIG_NAME).read_bytes())
        return _section(values, "search").get("past_present_share_buffer") is True
    return False


def dropped_experts(folder: Path, model_name: str) -> list[Miss]:
    """The refusal of the decoder `model_name` in `folder` when its builder drops what is to be fused, else nothing."""
    with suppress(OSError, ValueError, RecursionError):
        model = _model_of(folder)
        if model.get("type") in _DROPPED and _section(model, "decoder").get("filename") == model_name:
            return [
                Miss(
                    model_name,
                    f"it has no MoE block, and the builder of onnxruntime-genai 0.18 leaves out the routed experts of "
                    f"{model['type']} models: unless the checkpoint has none (num_local_experts 0), this model's "
                    "outputs are wrong; export it with transformers 5, see docs/exporting.md",
                )
            ]
    return []


def hint(folder: Path) -> list[str]:
    """What to say after `folder` was converted without --genai: nothing unless it is one of onnxruntime-genai."""
    with suppress(ModelFileError, OSError):
        if not GenaiFolder.read(folder).has_library:
            return [f"{CONFIG_NAME} does not name the library of HinaMoE: add --genai to run DST in onnxruntime-genai"]
    return []


def _model_of(folder: Path) -> Mapping[str, Any]:
    """What the configuration in `folder` says about the model; any error of reading when there is none."""
    return _section(json.loads((folder / CONFIG_NAME).read_bytes()), "model")


def _section(values: Any, name: str) -> Mapping[str, Any]:
    found = values.get(name) if isinstance(values, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _sections(values: Any) -> Iterator[dict[str, Any]]:
    """All objects in JSON `values`, the outer before the inner."""
    if isinstance(values, dict):
        yield values
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _sections(value)


def _depth(values: Any) -> int:
    """How many levels of objects and lists JSON `values` have."""
    depth, level = 0, [values]
    while level := [item for item in level if isinstance(item, dict | list)]:
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    return depth


def _model_names(values: Any) -> set[str]:
    """The file names of the models that a configuration names, of those beside it."""
    names = {section.get("filename") for section in _sections(values)}
    return {name for name in names if isinstance(name, str) and Path(name).name == name and name.endswith(".onnx")}


def _place(tensor: ir.ExternalTensor) -> tuple[Path, int, int]:
    return Path(tensor.path).resolve(), tensor.offset or 0, tensor.nbytes


def _moved(model: ir.Model, written: Path) -> Moved:
    """Where the weights of `model` that are still as they were in its source lie in the file `written`."""
    now = external_data.load(written).graph.initializers
    moved = {}
    for name, value in model.graph.initializers.items():
        before, after = value.const_value, now[name].const_value if name in now else None
        if isinstance(before, ir.ExternalTensor) and isinstance(after, ir.ExternalTensor):
            moved[_place(before)] = after
    return moved


def _copy_model(path: Path, folder: Path, moved: Moved) -> None:
    """Copy the model `path` and its weights into `folder`; weights in `moved` are read from there, not copied."""
    model = external_data.load(path)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                now = moved.get(_place(tensor), tensor)
                value.const_value = now if (now.dtype, now.shape) == (tensor.dtype, tensor.shape) else tensor
    external_data.save(model, folder / path.name)
