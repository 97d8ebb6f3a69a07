"""Prints the table of docs/presets.md: every preset, from its geometry. A test compares.

python docs/presets_table.py
"""

# ruff: noqa: INP001, T201  (a script, no module)

from __future__ import annotations

from kvcache.bench.sizing import boundary_bytes, bytes_per_token
from kvcache.core.errors import ConfigError
from kvcache.presets import model, names, preset

HEADER = (
    "| preset | bytes per token (fp8; fp8_ds_mla) | window, MiB | state, MiB |"
    " boundary = tokens of KV | grid | waste TP 1; 8, % | unverified |"
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _per_token(name: str) -> str:
    """In the model's own format, then in the others that it has."""
    own = _number(bytes_per_token(preset(name)))
    packed = model(name).kv_format("auto") == "fp8_ds_mla"
    others = []
    for kv_dtype in ("fp8", "fp8_ds_mla"):
        try:
            others.append(_number(bytes_per_token(preset(name, kv_dtype=kv_dtype))))
        except ConfigError:
            continue
    if packed:
        bf16 = _number(bytes_per_token(preset(name, kv_dtype="bf16")))
        return f"**{own}** fp8_ds_mla (bf16: {bf16})"
    return f"**{own}** ({'; '.join(others)})"


def _row(name: str) -> str:
    geometry = preset(name)
    one, kv = boundary_bytes(geometry), bytes_per_token(geometry)
    waste = [f"{100 * max(preset(name, tp=tp).padding()):.2f}" for tp in (1, 8)]
    windows = f"{one.windows / 2**20:,.2f}" if one.windows else ""
    states = f"{one.states / 2**20:,.1f}" if one.states else ""
    if one.pooling:
        states = f"{one.pooling / 2**20:,.2f} pooling"
    cells = (
        f"`{name}`",
        _per_token(name),
        windows,
        states,
        f"{one.total / kv:,.0f}" if one.total else "",
        str(geometry.grid_tokens),
        "; ".join(waste),
        "; ".join(text.split(":")[0] for text in model(name).unverified),
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """The whole table in Markdown."""
    return "\n".join([HEADER, "|" + "---|" * HEADER.count(" |"), *map(_row, names())]) + "\n"


def sources() -> str:
    """Where the numbers of each preset were read, one item each."""
    return "".join(f"- `{name}`: {'. '.join(model(name).sources)}.\n" for name in names())


if __name__ == "__main__":
    print(table())
    print(sources())
