"""A tier of shared memory, told step by step: who may attach, what is found, what goes wrong."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tiers.file_systems import mounted
from tiers.pieces import PATIENCE, one_group
from tiers.shared_pieces import MODEL, shared
from tiers.stamp_engine import GEOMETRY, engine, text

from kvcache.connectors import pool_chunks
from kvcache.connectors.shared import SharedConnector
from kvcache.connectors.shared_users import UserLocks
from kvcache.connectors.testing import Rig, Setup, chain, rig
from kvcache.core import host_memory
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.shared_pool import region_layout

Require = Callable[[str, str], NoReturn]


@contextmanager
def two(folder: Path, setup: Setup | None = None) -> Iterator[tuple[Rig, Rig]]:
    with (
        rig(lambda s: shared(s, folder), setup) as one,
        rig(lambda s: shared(s, folder), setup) as other,
    ):
        yield one, other


def test_what_one_stores_all_find_at_once(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = [*chain("a", 3), *chain("a", 2, 1)]
        one.store(keys)
        assert other.visible(keys) == [1] * 5
        assert other.plan_store(keys) is None
        other.lookup(1, keys)
        assert all(other.load(1, keys))
        foreign = chain("f", 2, 0, b"\x05" * 32)
        other.store(foreign)
        assert one.visible(foreign) == [1, 1]
        assert one.visible(chain("f", 2)) == [0, 0]
        one.lookup(1, foreign)
        assert all(one.load(1, foreign))


def test_what_one_looked_up_no_other_evicts(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = chain("a", 3)
        one.store(keys)
        assert other.lookup(1, keys) == [1] * 3
        for i in range(5):
            one.store(chain(f"b{i}", 5))
        assert other.load(1, keys) == [1] * 3
        one.store(chain("c", 8))
        assert other.visible(keys) == [0] * 3


def test_one_age_for_all(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        one.store(chain("a", 1))
        one.store(chain("b", 7))
        assert other.visible(chain("a", 1)) == [1]  # used: young again
        one.store(chain("c", 7))
        assert one.visible(chain("a", 1)) == [1]


def test_a_store_that_both_make_at_once_is_one_page(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = chain("a", 4)
        plans = one.planned(keys), other.planned(keys)
        for r, plan in zip((one, other), plans, strict=True):
            assert r.run(plan).ok.all()
        assert one.scheduler.stats().used_bytes == 4 * one.setup.geometry.groups[0].page_bytes
        assert one.pinned() == other.pinned() == 0


def test_a_page_that_changed_is_a_miss_and_goes(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = chain("a", 3)
        plan = one.planned(keys)
        one.run(plan)
        slots = one.worker._slots[0]  # type: ignore[attr-defined]
        byte = slots.address + int(plan.slots[1]) * slots.page_bytes + 5
        ctypes.memset(byte, ctypes.string_at(byte, 1)[0] ^ 1, 1)
        other.lookup(1, keys)
        assert other.load(1, keys) == [1, 0, 1]
        stats = other.scheduler.stats()
        assert (stats.gone_pages, stats.failed_pages, stats.errors) == (1, 1, {"Damaged": 1})
        assert one.visible(keys) == [1, 0, 1]


def test_the_slot_of_another_key_is_not_taken_for_the_wanted_one(tmp_path: Path) -> None:
    """Whatever the index says: the checksum knows the key."""
    with rig(lambda s: shared(s, tmp_path)) as r:
        keys = chain("a", 2)
        r.store(keys)
        r.lookup(1, keys)
        transfer = r.plan_load(1, keys)
        transfer.slots[:] = transfer.slots[::-1].copy()
        assert r.run(transfer).ok.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages": (9, 3)}, "has 8 slots"),
        ({"fingerprint": Fingerprint(model="other", kv_dtype="uint8")}, "another model"),
        ({"layout": "rank 1"}, "another model, KV format or layout"),
    ],
)
def test_a_region_in_use_is_shared_by_its_like_alone(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        with pytest.raises(ConfigError, match=f"in use and cannot be shared: .*{message}"):
            shared(Setup(), tmp_path, **options)
        with pytest.raises(ConfigError, match=r"it has 1 groups|has 2 groups"):
            shared(Setup(geometry=one_group(64), pages=(8,)), tmp_path)
        r.store(chain("a", 2))
        assert all(r.visible(chain("a", 2)))


@pytest.mark.parametrize("damage", ["cut", "magic", "mode", "link"])
def test_a_region_that_is_not_what_it_should_be_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "region" / "region"
    with rig(lambda s: shared(s, tmp_path)), ExitStack() as stack:
        if damage in {"cut", "magic"}:
            copy = file.read_bytes()
            file.unlink()
            file.write_bytes(copy[:4096] if damage == "cut" else b"x" + copy[1:])
            file.chmod(0o600)
            living = UserLocks(file)  # else it is stale
            stack.callback(living.close)
            assert living.take(5)
        elif damage == "mode":
            file.chmod(0o640)
        else:
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        words = {
            "cut": "tables are damaged",
            "magic": "no region",
            "mode": "mode 640",
            "link": "link",
        }
        with pytest.raises(ConfigError, match=words[damage]):
            shared(Setup(), tmp_path)


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755: it must be user"):
        shared(Setup(), folder)
    made = tmp_path / "made"
    with rig(lambda s: shared(s, made)):
        modes = {path.name: path.stat().st_mode & 0o777 for path in made.rglob("*")}
        assert modes == {"lock": 0o600, "region": modes["region"]}
        assert (made / "region").stat().st_mode & 0o777 == 0o700
        assert (made / "region" / "region").stat().st_mode & 0o777 == 0o600


def test_what_else_lies_in_the_folder_stays(tmp_path: Path) -> None:
    """Only what is a region, and nothing but that, is taken for a stale one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "region").write_text("of France")
    (tmp_path / "mine" / "thesis").write_text("chapter 1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "region").mkdir(mode=0o700)  # its maker died before it began
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale" / "region").write_text("")
    with rig(lambda s: shared(s, tmp_path)) as r:
        r.store(chain("a", 2))
        assert not (tmp_path / "stale").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "empty", "file", "lock"}
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"region", "thesis"}


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65, "-a", "a\n"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"SharedConnector.name is"):
        shared(Setup(), tmp_path, name=name)


def test_where_regions_lie_by_default() -> None:
    name = f"test-{os.getpid()}"
    folder = Path(f"/dev/shm/kvcache-{os.geteuid()}")  # noqa: S108
    with rig(
        lambda s: SharedConnector(
            s.geometry, name=name, fingerprint=MODEL, layout="whole", pages=s.pages
        )
    ) as r:
        assert (folder / name / "region").exists()
        r.store(chain("a", 2))
    assert not (folder / name).exists()


def test_users_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.connectors.shared_region.MOST_USERS", 2)
    with two(tmp_path) as (one, _):
        with pytest.raises(ConfigError, match="it has 2 users, and no room for more"):
            shared(Setup(), tmp_path)
        one.store(chain("a", 1))
    with rig(lambda s: shared(s, tmp_path)):
        pass


@pytest.mark.parametrize(
    ("page_bytes", "percent"), [(4 << 10, 3.5), (8 << 10, 1.75), (16 << 10, 1), (720 << 10, 0.02)]
)
def test_bookkeeping_is_as_much_as_is_said(page_bytes: int, percent: float) -> None:
    """140 bytes a slot, for any number of slots, beside a page of the head; docs/tiers.md has the table."""
    for slots in (100, 1000, 10**6):
        tables = region_layout([slots], [page_bytes]).tables_bytes
        assert abs(tables - 140 * slots) <= 8192
        assert tables <= percent / 100 * slots * page_bytes + 8192


def test_bookkeeping_is_told(tmp_path: Path) -> None:
    with rig(lambda s: shared(s, tmp_path), Setup(geometry=one_group(64), pages=(8,))) as r:
        assert r.scheduler.tables_bytes == region_layout([8], [64]).tables_bytes  # type: ignore[attr-defined]


def test_an_engine_finds_what_another_computed(tmp_path: Path) -> None:
    """Prompt, output and states, every byte compared; and both go on together."""
    setup = Setup(geometry=GEOMETRY, pages=(64, 64))
    with (
        engine(connector=shared(setup, tmp_path)) as one,
        engine(connector=shared(setup, tmp_path)) as other,
    ):
        first = one.serve(text(0, 41), output=8)
        hit = other.serve([*first.tokens, *text(1, 8)]).hits[0]
        assert (hit.device_tokens, hit.hit_tokens) == (0, 48)
        assert other.serve(text(0, 41), salt="x").hits[0].hit_tokens == 0
        for seed in range(6):
            (one, other)[seed % 2].serve(text(seed % 3, 40))
        for e in (one, other):
            e.assert_idle()
            assert e.offload.stats().loaded_pages > 0


# ---- memory --------------------------------------------------------------------------------------


def test_a_file_system_that_is_too_small_is_found_before_memory_is_touched(
    tmp_path: Path, require: Require
) -> None:
    setup = Setup(geometry=one_group(1 << 16), pages=(64,))
    with mounted(tmp_path / "shm", "tmpfs", "size=2m,mode=700", require) as folder:
        with pytest.raises(
            ConfigError, match=r"SharedConnector.pages asks for \d+ bytes .*--shm-size"
        ):
            shared(setup, folder)
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_file_system_that_others_fill_fails_stores_and_kills_nobody(
    tmp_path: Path, require: Require, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No SIGBUS: what has no memory behind it is not written; what is old makes room."""
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr("kvcache.connectors.slots_aside.RETRY_SECONDS", 1e9)
    monkeypatch.setattr(pool_chunks.PoolChunks, "start", lambda _: None)  # on demand alone
    setup = Setup(geometry=one_group(1 << 16), pages=(32,))
    with (
        mounted(tmp_path / "shm", "tmpfs", "size=4m,mode=700", require) as folder,
        rig(lambda s: shared(s, folder), setup) as r,
    ):
        assert r.store(chain("a", 4)) == chain("a", 4)
        about = os.statvfs(folder)
        (folder / "ballast").write_bytes(bytes(about.f_bavail * about.f_frsize))
        result = r.run(r.planned(chain("b", 4)))
        assert result.error.startswith("NoSpace: 4 of 4 pages: No space left")
        assert r.scheduler.stats().errors == {"NoSpace": 1}
        assert r.store(chain("c", 2)) == chain("c", 2)
        assert r.visible(chain("a", 4)) == [1, 1, 0, 0]
        assert r.scheduler.stats().pinned_pages == 0
        (folder / "ballast").unlink()
        monkeypatch.setattr(r.scheduler._aside, "_until", 1e-9)  # type: ignore[attr-defined]
        assert r.store(chain("b", 4)) == chain("b", 4)
        assert r.visible(chain("a", 2)) == [1, 1]


def test_memory_that_went_since_the_start_fails_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        assert r.worker.chunks.wait(PATIENCE)  # type: ignore[attr-defined]
    monkeypatch.setattr(pool_chunks.PoolChunks, "start", lambda _: None)
    with rig(lambda s: shared(s, tmp_path)) as r:
        monkeypatch.setattr(host_memory, "available", lambda: (10, "somebody"))
        result = r.run(r.planned(chain("a", 1)))
        assert result.error == "NoSpace: 1 of 1 pages: somebody leaves 10 bytes"


def test_after_the_end_nothing_is_found_and_everything_can_be_let_go(tmp_path: Path) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        keys = chain("a", 3)
        r.store(keys)
        r.lookup(1, keys)
        r.worker.close(PATIENCE)
        assert r.lookup(2, keys) == [0] * 3
        r.scheduler.release(1)
        r.scheduler.release(2)
        assert r.pinned() == 0
        assert np.array_equal(r.scheduler.stats().used_bytes, 0)


def test_what_a_region_counts_is_in_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        assert (r.scheduler.stats().busy_calls, r.scheduler.stats().repairs) == (0, 0)
        tables = r.scheduler._region.tables  # type: ignore[attr-defined]
        monkeypatch.setattr(tables, "busy", 3)
        told = [pool.shared_stats()._replace(recoveries=i) for i, pool in enumerate(tables.pools)]
        for pool, stats in zip(tables.pools, told, strict=True):
            monkeypatch.setattr(pool, "shared_stats", lambda stats=stats: stats)
        assert (r.scheduler.stats().busy_calls, r.scheduler.stats().repairs) == (3, 1)


def test_memory_that_another_process_made_ready_needs_no_room_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region fills what there was: a second process uses it all the same, and keeps no slot idle."""
    with rig(lambda s: shared(s, tmp_path)) as r:
        assert r.worker.chunks.wait(PATIENCE)  # type: ignore[attr-defined]
        monkeypatch.setattr(host_memory, "available", lambda: (0, "somebody"))
        with rig(lambda s: shared(s, tmp_path)) as other:
            assert other.worker.chunks.wait(PATIENCE)  # type: ignore[attr-defined]
            assert other.scheduler.stats().not_ready == ""
            keys = chain("a", r.setup.pages[0])
            assert other.store(keys) == keys
            assert r.visible(keys) == [1] * len(keys)
            assert r.pinned() == 0


def test_slots_with_memory_behind_them_are_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        assert r.worker.chunks.wait(PATIENCE)  # type: ignore[attr-defined]
        monkeypatch.setattr(pool_chunks.PoolChunks, "start", lambda _: None)
        with rig(lambda s: shared(s, tmp_path)) as other:
            aside = other.scheduler._aside  # type: ignore[attr-defined]
            aside.take()
            assert sum(map(len, aside.slots)) == 0
            assert r.pinned() == 0
