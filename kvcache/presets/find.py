"""A model by what a user calls it: the name of a preset, or the path of a config.json or of its folder."""

from __future__ import annotations

from pathlib import Path

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError
from kvcache.core.values import shown
from kvcache.presets.hf_config import CONFIG, QUANTISATION, read_hf_config
from kvcache.presets.model import Model
from kvcache.presets.registry import model, names


def find_model(name: str) -> tuple[Model, str]:
    """A preset of this name, else the config at this path; and which of both it was.

    `ConfigError`: it is neither. `InputError`: as `read_hf_config`.
    """
    if name in names():
        return model(name), "preset"
    if _exists(name):
        return read_hf_config(name), "config"
    raise ConfigError(
        f"there is no preset {shown(name)}{alike(name, names())}, and no config.json or folder of"
        f" that path: presets are {', '.join(names())}"
    )


def config_files(name: str) -> list[Path]:
    """Files that `find_model` reads for this name; none for a preset."""
    if name in names() or not _exists(name):
        return []
    config = Path(name) / CONFIG if Path(name).is_dir() else Path(name)
    return [config, config.with_name(QUANTISATION)]


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).exists()
    except (OSError, ValueError):  # too long, or no name at all
        return False
