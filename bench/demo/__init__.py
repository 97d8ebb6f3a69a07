"""The demo behind `kvcache demo`: what offload is worth, with a real model. Importing loads torch."""

from kvcache.bench.demo.play import MODES, Played, Player, play_turns, size_pools, warm_up
from kvcache.bench.demo.report import answer, record
from kvcache.bench.demo.script import (
    DemoSettings,
    Kit,
    Script,
    load_kit,
    own_texts,
    read_text,
    write_script,
)
from kvcache.bench.demo.turn import Turn

__all__ = [
    "MODES",
    "DemoSettings",
    "Kit",
    "Played",
    "Player",
    "Script",
    "Turn",
    "answer",
    "load_kit",
    "own_texts",
    "play_turns",
    "read_text",
    "record",
    "size_pools",
    "warm_up",
    "write_script",
]
