"""What a folder of pages is to the next process: found again, in order, by nobody who should not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers.disk_pieces import MODEL, disk, page_paths
from tiers.pieces import one_group

from kvcache.connectors.base import Connector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.testing import Key, Rig, Setup, chain, rig
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.page_files import page_file_bytes
from kvcache.core.specs import FullAttention

FOREIGN = bytes(range(32))


def test_the_next_process_finds_every_page_with_its_bytes(tmp_path: Path) -> None:
    keys = [*chain("a", 5), *chain("a", 3, 1), *chain("f", 2, 0, FOREIGN)]
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        for part in (keys[:5], keys[5:8], keys[8:]):
            assert r.store(part) == part
    assert len(page_paths(tmp_path)) == len(keys)
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        stats = r.scheduler.stats()
        assert (stats.used_bytes, stats.pinned_pages, stats.gone_pages) == (
            7 * r.setup.geometry.groups[0].page_bytes + 3 * r.setup.geometry.groups[1].page_bytes,
            0,
            0,
        )
        for request, part in enumerate((keys[:8], keys[8:])):
            assert all(r.lookup(request, part))
            assert all(r.load(request, part))
        assert r.plan_store(keys[:8]) is None, "what is on disk was planned again"


def test_what_was_oldest_is_evicted_first_after_a_restart(tmp_path: Path) -> None:
    """By the order of stores and loads; of one transfer, the tail of the prefix before its head."""
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        r.store(chain("a", 3))
        r.store(chain("b", 3))
        r.lookup(1, chain("a", 3))
        assert all(r.load(1, chain("a", 3)))
        r.store(chain("c", 2))
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        gone = []
        everything = [*chain("a", 3), *chain("b", 3), *chain("c", 2)]
        for i in range(8):
            r.store([Key(f"new{i}")])
            there = r.scheduler.holds(r.request_keys(1, everything))
            assert there is not None
            gone.append(
                next(
                    key.name
                    for key, here in zip(everything, there[0].tolist(), strict=True)
                    if not here and key.name not in gone
                )
            )
        assert gone == ["b2", "b1", "b0", "a2", "a1", "a0", "c1", "c0"]


def test_a_smaller_tier_keeps_the_youngest_and_removes_the_other_files(tmp_path: Path) -> None:
    keys = chain("a", 8)
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        for key in keys:
            r.store([key])
    with rig(lambda setup: disk(setup, tmp_path), Setup(pages=(3, 1))) as r:
        assert r.visible(keys) == [0] * 5 + [1] * 3
    assert len(page_paths(tmp_path)) == 3


def test_eviction_removes_files_so_that_space_is_bounded(tmp_path: Path) -> None:
    most = 0
    with rig(lambda setup: disk(setup, tmp_path)) as r:
        for i in range(40):
            r.store(chain(f"k{i}", 1 + i % 3) + chain(f"k{i}", i % 2, 1))
            files = [len(page_paths(tmp_path, group)) for group in (0, 1)]
            assert files[0] <= r.setup.pages[0]
            assert files[1] <= r.setup.pages[1]
            most = max(most, files[0])
        assert most == r.setup.pages[0]


GROUP: dict[str, Any] = {
    "name": "kv",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "block_tokens": 16,
}


@pytest.mark.parametrize(
    ("geometry", "fingerprint", "layout"),
    [
        ({}, {"model": "other"}, "whole"),
        ({}, {"kv_dtype": "float16"}, "whole"),
        ({}, {"position_scheme": "yarn"}, "whole"),
        ({}, {}, "rank 1 of 2"),
        ({"kv_heads": 4, "head_dim": 4}, {}, "whole"),  # as many bytes
        ({"head_dim": 16, "element_bytes": 1}, {}, "whole"),
        ({"layers": 3}, {}, "whole"),
    ],
)
def test_bytes_of_another_layout_are_never_read(
    tmp_path: Path, geometry: dict[str, Any], fingerprint: dict[str, Any], layout: str
) -> None:
    """And go, once nobody uses them, if they are of the same model and rank."""
    stays = bool(fingerprint) or layout != "whole"

    def setup(**changes: Any) -> Setup:
        return Setup(geometry=Geometry((FullAttention(**{**GROUP, **changes}),)), pages=(8,))

    keys = chain("a", 3)
    with rig(lambda s: disk(s, tmp_path), setup()) as r:
        r.store(keys)
        # Somebody else's, at the same time: side by side.
        with rig(
            lambda s: disk(s, tmp_path, fingerprint=replace(MODEL, **fingerprint), layout=layout),
            setup(**geometry),
        ) as other:
            assert not any(other.visible(keys))
            assert len(page_paths(tmp_path)) == 3
            other.store(keys)
        assert len(page_paths(tmp_path)) == 6
        assert all(r.visible(keys))
    with rig(
        lambda s: disk(s, tmp_path, fingerprint=replace(MODEL, **fingerprint), layout=layout),
        setup(**geometry),
    ) as other:
        assert all(other.visible(keys))
        assert len(page_paths(tmp_path)) == (6 if stays else 3)
    with rig(lambda s: disk(s, tmp_path), setup()) as r:
        assert r.visible(keys) == [int(stays)] * 3


def test_what_does_not_change_the_bytes_does_not_change_the_layout(tmp_path: Path) -> None:
    """The secret and the epoch of the weights are in every key."""
    keys = chain("a", 3)
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(keys)
    same = replace(MODEL, secret=b"hush", weights_epoch=7)
    with rig(lambda s: disk(s, tmp_path, fingerprint=same, threads=1, batch_bytes=1)) as r:
        assert all(r.visible(keys))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(chain("a", 3))
    (one, *_) = page_paths(tmp_path)
    strangers = [tmp_path / "notes.txt", one.with_name("README"), one.with_name("A" * 64)]
    strangers += [tmp_path / ("0" * 32) / "file", one.parent.parent / "file"]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("mine")
    with rig(lambda s: disk(s, tmp_path), Setup(geometry=one_group(128), pages=(8,))):
        pass
    assert [path.exists() for path in strangers] == [True, False, False, True, False]
    with rig(lambda s: disk(s, tmp_path)) as r:
        assert not any(r.visible(chain("a", 3)))


def test_files_and_folders_are_for_their_user_alone(tmp_path: Path) -> None:
    """Pages are what was said to the model."""
    folder = tmp_path / "cache"
    with rig(lambda s: disk(s, folder)) as r:
        r.store(chain("a", 2))
        for path in page_paths(folder):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
        (layout,) = (p for p in folder.iterdir() if p.is_dir())
        assert layout.stat().st_mode & 0o777 == 0o700
        assert "model: 'test'" in (layout / "layout.txt").read_text()


def test_a_file_is_as_long_as_it_is_counted(tmp_path: Path) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(chain("a", 2) + chain("a", 1, 1))
        for group, spec in enumerate(r.setup.geometry.groups):
            for path in page_paths(tmp_path, group):
                assert path.stat().st_size == page_file_bytes(spec.page_bytes)


class BytesPath(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"/tmp/x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": ""}, "folder is '': give the path"),
        ({"folder": 3}, "folder is 3: give the path"),
        ({"folder": "a\0b"}, r"folder is 'a\\x00b': give the path"),
        ({"folder": BytesPath()}, r"folder is .*: give the path"),
        ({"folder": "/proc/nowhere"}, r"folder /proc/nowhere cannot be used \(.*\): give a folder"),
        ({"fingerprint": "llama"}, "fingerprint is 'llama': give the Fingerprint"),
        ({"fingerprint": Fingerprint()}, "names no model: pages are there for other processes"),
        ({"pages": None}, "DiskConnector needs either capacity_bytes or pages"),
        ({"capacity_bytes": 1 << 20}, "DiskConnector needs either capacity_bytes or pages"),
        ({"pages": None, "capacity_bytes": 8191}, "one page of each group takes 8192 bytes"),
        ({"pages": [2**31 - 2]}, r"pages asks for 16\.00 TiB of disk space, .* in all: lower"),
        ({"pages": [0]}, "gives group 'a' 0 slots"),
        ({"threads": 0}, "DiskConnector.threads is 0"),
        ({"batch_bytes": 0}, "DiskConnector.batch_bytes is 0"),
        ({"queue_depth": 0}, "DiskConnector.queue_depth is 0"),
        ({"deadline_seconds": 0}, "DiskConnector.deadline_seconds is 0"),
        ({"direct": 1}, "DiskConnector.direct is 1"),
        ({"durable": None}, "DiskConnector.durable is None"),
        ({"layout": 3}, "DiskConnector.layout is 3"),
        ({"layout": ""}, "DiskConnector.layout is empty: say whose .* 'whole' .* 'rank 0 of 8'"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments = {
        "folder": tmp_path,
        "fingerprint": MODEL,
        "layout": "whole",
        "pages": [4],
        **options,
    }
    with pytest.raises(ConfigError, match=message):
        DiskConnector(one_group(64), **arguments)
    assert not list(tmp_path.glob("*/tmp/*")), "something was left open"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskConnector(
            one_group(64), folder=tmp_path / "file", fingerprint=MODEL, layout="whole", pages=[4]
        )


def test_durable_files_are_the_same_files(tmp_path: Path) -> None:
    """That they outlive a loss of power nobody can test here; that it works, anybody can."""
    keys = chain("a", 4) + chain("a", 3, 1)
    with rig(lambda s: disk(s, tmp_path, durable=True, batch_bytes=1 << 20)) as r:
        assert r.store(keys) == keys
    with rig(lambda s: disk(s, tmp_path)) as r:
        assert all(r.lookup(1, keys))
        assert all(r.load(1, keys))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_way_of_moving_moves_the_same_bytes(
    tmp_path: Path, direct: bool, threads: int
) -> None:
    """Pages that fill whole blocks move in place, others through a buffer."""
    geometry = one_group(8192, 16)
    keys = chain("a", 7)
    for options in ({"direct": direct, "threads": threads}, {}):
        with rig(
            lambda s, o=options: disk(s, tmp_path, **o),  # type: ignore[misc]
            Setup(geometry=geometry, pages=(8,)),
        ) as r:
            if options:
                r.store(keys)
            assert all(r.lookup(1, keys))
            assert all(r.load(1, keys))


def open_files() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def test_a_dropped_connector_lets_its_folder_go(tmp_path: Path) -> None:
    def tier() -> Connector:
        return disk(Setup(), tmp_path)

    connector = tier()
    assert len(list(tmp_path.glob("*/tmp/*"))) == 1
    connector.worker.close()
    connector.worker.close()
    assert not list(tmp_path.glob("*/tmp/*"))
    connector = tier()
    before = len(open_files())
    del connector
    assert len(open_files()) < before
    assert not list(tmp_path.glob("*/tmp/*"))


def test_a_rig_of_a_disk_tier_has_nothing_left_after_close(tmp_path: Path) -> None:
    before = len(open_files())
    for _ in range(3):
        r = Rig(lambda s: disk(s, tmp_path))
        r.store(chain("a", 2))
        assert r.worker.close()
    assert len(open_files()) == before
