"""All faults. They stand in four files: keys and hits, pages and memory, explanations, what is in Python."""

from __future__ import annotations

from mutate.mutants_explain import EXPLAIN
from mutate.mutants_keys import KEYS
from mutate.mutants_memory import MEMORY
from mutate.mutants_python import PYTHON

MUTANTS = [*KEYS, *MEMORY, *EXPLAIN, *PYTHON]
