"""The corpus: every exporter times every architecture it supports, exported, converted and judged.

`python -m models.corpus` (`make corpus`) makes the exports that are missing under build/corpus, converts them all and
prints the table. `registry.py` lists exporters and architectures, `recipes.py` makes one export, `judge.py` compares
torch, export and converted model, and `known.py` lists the results that are not "fused" and why that is right.
"""
