"""KV geometry of known models, one small file per model family, each number with its source."""

from kvcache.presets.hf_config import from_hf_config, read_hf_config
from kvcache.presets.model import Model
from kvcache.presets.registry import model, names, preset

__all__ = ["Model", "from_hf_config", "model", "names", "preset", "read_hf_config"]
