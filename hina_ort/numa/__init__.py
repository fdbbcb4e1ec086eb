"""Memory on machines with several NUMA nodes: weights spread over the nodes, and a report of where they are.

docs/numa.md says when this pays.
"""

from __future__ import annotations

from hina_ort.numa.interleaving import NumaWarning, interleave

__all__ = ["NumaWarning", "interleave"]
