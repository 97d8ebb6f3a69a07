"""All faults, a file for each room."""

from __future__ import annotations

from mutate.mutants_bench import BENCH
from mutate.mutants_copy import COPY
from mutate.mutants_engine import ENGINE
from mutate.mutants_explain import EXPLAIN
from mutate.mutants_host import HOST
from mutate.mutants_keys import KEYS
from mutate.mutants_memory import MEMORY
from mutate.mutants_python import PYTHON
from mutate.mutants_scheduler import SCHEDULER
from mutate.mutants_simulated import SIMULATED
from mutate.mutants_tiers import TIERS

MUTANTS = [
    *KEYS,
    *MEMORY,
    *EXPLAIN,
    *PYTHON,
    *ENGINE,
    *SCHEDULER,
    *SIMULATED,
    *TIERS,
    *HOST,
    *COPY,
    *BENCH,
]
