"""All faults. They stand in five files: keys and hits, pages and memory, explanations, what is in Python, the engine."""

from __future__ import annotations

from mutate.mutants_engine import ENGINE
from mutate.mutants_explain import EXPLAIN
from mutate.mutants_keys import KEYS
from mutate.mutants_memory import MEMORY
from mutate.mutants_python import PYTHON

MUTANTS = [*KEYS, *MEMORY, *EXPLAIN, *PYTHON, *ENGINE]
