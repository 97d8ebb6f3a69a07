"""What a lookup reads, by the definition of each kind of attention: no rule of the product is asked."""

from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import found_keys, hit_of, run
from laws.engine import Engine

from kvcache.core.specs import ChunkedLocal, LatentWindow, PoolingState, SlidingWindow
from kvcache.core.specs.base import GroupSpec
from kvcache.retention import Sparse


def tokens_read(spec: GroupSpec, at: int) -> list[int]:
    """Earlier tokens whose rows the query of token `at` reads."""
    if isinstance(spec, SlidingWindow | LatentWindow):
        return [t for t in range(at) if at - t < spec.window]
    if isinstance(spec, ChunkedLocal):
        return [t for t in range(at) if t // spec.chunk_tokens == at // spec.chunk_tokens]
    assert isinstance(spec, PoolingState)  # an entry is made of a whole ratio's tokens
    entries = {at // spec.ratio, at // spec.ratio - spec.overlap}
    return [t for t in range(at) if t // spec.ratio in entries]


blocks = st.sampled_from([1, 2, 4])
windows = st.builds(lambda block, size: cases.window("w", size, block), blocks, st.integers(1, 13))
latent = st.builds(
    lambda block, size: LatentWindow(
        name="w", layers=1, entry_bytes=4, window=size, block_tokens=block
    ),
    blocks,
    st.integers(1, 13),
)
chunked = st.builds(
    lambda block, chunks: ChunkedLocal(
        name="w",
        layers=1,
        kv_heads=1,
        head_dim=4,
        chunk_tokens=block * chunks,
        block_tokens=block,
        element_bytes=1,
    ),
    blocks,
    st.integers(1, 5),
)
pooling = st.builds(
    lambda block, blocks_of_ratio, overlap: PoolingState(
        name="w",
        layers=1,
        ratio=block * blocks_of_ratio,
        token_bytes=4,
        block_tokens=block,
        overlap=overlap,
    ),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.booleans(),
)


@cases.law(250)
@given(
    spec=st.one_of(windows, windows, latent, chunked, pooling),
    prompt=cases.texts(60, least=12),
    declared=st.lists(st.integers(0, 60), max_size=2),
    chunks=cases.chunk_plans,
)
def test_law_10_a_boundary_keeps_the_blocks_of_the_tokens_that_its_query_reads_and_no_others(
    spec: GroupSpec, prompt: list[int], declared: list[int], chunks: list[int]
) -> None:
    """Beside full attention, with blocks of 4 tokens: the grid."""
    engine = Engine(cases.geometry(cases.full("a", 4), spec), Sparse())
    block, n = spec.rules.block_tokens, len(prompt)
    inside = [b for b in declared if b <= n]
    run(engine, prompt, boundaries=inside, chunks=chunks)
    positions = {b // 4 * 4 for b in (*inside, n - 1, n)}
    expected = {t // block * block + block for p in positions for t in tokens_read(spec, p)}
    _, found = found_keys(engine, [prompt])
    assert {key.end for key in found} == expected
    for position in positions:
        assert hit_of(engine, [*prompt[:position], 9]) == position
