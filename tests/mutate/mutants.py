"""All faults, in a file for each room: keys, memory, explanations, Python, the engine, tiers, benchmarks."""

from __future__ import annotations

from mutate.mutants_bench import BENCH
from mutate.mutants_engine import ENGINE
from mutate.mutants_explain import EXPLAIN
from mutate.mutants_keys import KEYS
from mutate.mutants_memory import MEMORY
from mutate.mutants_python import PYTHON
from mutate.mutants_tiers import TIERS

MUTANTS = [*KEYS, *MEMORY, *EXPLAIN, *PYTHON, *ENGINE, *TIERS, *BENCH]
