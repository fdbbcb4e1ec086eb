"""Nodes by what a person calls them: their name, that of a value, or part of the path of their module."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST = 12
"""So many modules are named in an error."""


class NamingError(ValueError):
    """Nothing, or more than one module, is called as asked; the message names others."""


def matching(nodes: Sequence[ir.Node], asked: str) -> list[ir.Node]:
    """The nodes that `asked` names.

    The nodes of that name; else the nodes that compute or read the value of that name; else all nodes of the module
    with that path or the end, or a part, of that path (`layers.0.mlp`, dots or slashes). Raises NamingError when this
    is true of several modules.
    """
    exact = [node for node in nodes if node.name == asked]
    if exact:
        return exact
    computing = [node for node in nodes if any(value.name == asked for value in node.outputs)]
    reading = [node for node in nodes if any(value is not None and value.name == asked for value in node.inputs)]
    if computing or reading:
        return computing or reading
    wanted = _parts(asked)
    modules: dict[tuple[str, ...], dict[ir.Node, None]] = {}
    for node in nodes if wanted else ():
        for path in _paths(node):
            if (end := _end_of(wanted, path)) is not None:
                modules.setdefault(path[:end], {})[node] = None
    longest = max(modules, key=len, default=())
    if any(longest[len(longest) - len(path) :] != path for path in modules):
        shown = [".".join(path) for path in list(modules)[:_MOST]]
        more = f" and {len(modules) - _MOST} more" if len(modules) > _MOST else ""
        raise NamingError(f"{asked} is a part of several modules: {', '.join(shown)}{more}; name one of them")
    return list(dict.fromkeys(node for found in modules.values() for node in found))


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.replace("/", ".").split(".") if part)


def _end_of(wanted: tuple[str, ...], path: tuple[str, ...]) -> int | None:
    """Where `wanted` ends in `path`, if it is a part of it."""
    ends = (start + len(wanted) for start in range(len(path) - len(wanted) + 1))
    return next((end for end in ends if path[end - len(wanted) : end] == wanted), None)


def _paths(node: ir.Node) -> list[tuple[str, ...]]:
    """Paths that say where the node belongs: that of its name, its scopes, and the weights that it reads."""
    paths = [_parts(node.name or "")]
    if scopes := node.metadata_props.get(_SCOPES):
        try:
            names = ast.literal_eval(scopes)
        except (ValueError, SyntaxError):
            names = []
        paths += [_parts(str(name)) for name in names[:-1]]
    paths += [_parts(v.name or "") for v in node.inputs if v is not None and v.is_initializer()]
    return paths
