"""The disk connector: a folder of local files as a tier, which outlives the process.

Never a wrong byte: a file is read whole, and its head and checksum compared, before its page counts
as loaded. What is cut short, changed, of another layout, or not there is a miss, is counted, and is
removed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvcache.connectors.base import Connector
from kvcache.connectors.disk_entry import cannot_use
from kvcache.connectors.disk_folder import DiskFolder
from kvcache.connectors.disk_format import layout_text, role_text
from kvcache.connectors.disk_news import DiskNews
from kvcache.connectors.disk_scheduler import DiskScheduler
from kvcache.connectors.disk_worker import DiskWorker
from kvcache.connectors.settings import (
    folder_path,
    layout_setting,
    require_fingerprint,
    require_seconds,
    require_whole,
    slots_of_groups,
)
from kvcache.core.errors import ConfigError
from kvcache.core.events.records import MEDIUM_STORAGE
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry, require_geometry
from kvcache.core.page_files import PageFiles, page_file_bytes
from kvcache.core.values import flag, human_bytes, index_seed

DEFAULT_BATCH_BYTES = 8 << 20
"""A few ms of a fast disk: how fine deadlines are, and how long a load waits for a store."""


class DiskConnector(Connector):
    """A folder of files as a tier.

    Processes that give the same folder, model, geometry and `layout` share pages: each finds what the
    others have stored, and the bound is for all together (give all the same). What another geometry
    of the same model left under the same `layout` is removed once nobody uses it.

    Args:
        geometry: the groups, as the manager has them.
        folder: a folder on a local file system, for nothing else. Made where it is not there.
        fingerprint: that of the manager. Its model must be named: the folder outlives the process.
        layout: whose bytes they are, as nothing else tells: "whole" where this process has whole
            pages, its rank ("rank 0 of 8") where it has a shard of each; and an order of pages that
            is your own. Processes with different layouts share nothing, and leave each other's pages
            alone; each has a bound of its own.
        capacity_bytes: disk space to use, split over the groups by `split_bytes`, each page with
            its file's head. Or:
        pages: files of each group.
        queue_depth: loads, and stores, that may be in flight at once; more are refused.
        deadline_seconds: after so long a transfer counts as late.
        state_interval_tokens: for `split_bytes`: tokens between two stored recurrent states.
        batch_bytes: moved between two looks at queue and deadline.
        threads: files that are read or written at once.
        direct: past the kernel's cache (O_DIRECT); None: where the file system can.
        durable: files outlive a loss of power, not only of the process. Each is synced then.
        events: whether `Offload.take_events` will be read: what becomes visible here and what goes.
        seed: of the hash functions of its indexes; None: random ones, as in `Manager`.
        files: replaces the native reads and writes; for tests.

    Raises:
        ConfigError: a setting that cannot work, a folder that cannot be used, or a bound larger
            than the file system.
    """

    __slots__ = ()

    def __init__(
        self,
        geometry: Geometry,
        *,
        folder: str | os.PathLike[str],
        fingerprint: Fingerprint,
        layout: str,
        capacity_bytes: int | None = None,
        pages: Sequence[int] | None = None,
        queue_depth: int = 32,
        deadline_seconds: float = 60.0,
        state_interval_tokens: int = 1024,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        threads: int = 2,
        direct: bool | None = None,
        durable: bool = False,
        events: bool = False,
        seed: int | None = None,
        files: type[PageFiles] = PageFiles,
    ) -> None:
        require_geometry(geometry)
        require_fingerprint("DiskConnector", fingerprint)
        events, seed = flag(events, "DiskConnector.events"), index_seed(seed, "DiskConnector.seed")
        durable = flag(durable, "DiskConnector.durable")
        if direct is not None:
            direct = flag(direct, "DiskConnector.direct")
        require_whole("DiskConnector.queue_depth", queue_depth)
        require_whole("DiskConnector.batch_bytes", batch_bytes)
        require_whole("DiskConnector.threads", threads)
        require_seconds("DiskConnector.deadline_seconds", deadline_seconds)
        sizes = [group.page_bytes for group in geometry.groups]
        file_bytes = [page_file_bytes(size) for size in sizes]
        slots, setting = slots_of_groups(
            "DiskConnector",
            geometry,
            capacity_bytes=capacity_bytes,
            pages=pages,
            state_interval_tokens=state_interval_tokens,
            slot_bytes=file_bytes,
        )
        layout = layout_setting("DiskConnector", layout)
        root = folder_path("DiskConnector", folder)
        opened = DiskFolder(
            root,
            text=layout_text(geometry, fingerprint, layout),
            role=role_text(fingerprint, layout),
            page_bytes=sizes,
            direct=direct,
            durable=durable,
            threads=threads,
            files=files,
        )
        news = DiskNews()
        try:
            _require_room(setting, opened.path, sum(map(_product, file_bytes, slots)))
            found = [opened.scan(group) for group in range(len(sizes))]
            scheduler = DiskScheduler(
                sizes,
                slots,
                found=found,
                news=news,
                deadline_seconds=deadline_seconds,
                events=events,
                seed=seed,
            )
        except OSError as error:
            opened.close()
            raise cannot_use(root, error) from error
        except BaseException:
            opened.close()
            raise
        super().__init__(
            name="disk",
            scheduler=scheduler,
            worker=DiskWorker(
                opened,
                news,
                groups=[group.name for group in geometry.groups],
                page_bytes=sizes,
                queue_depth=queue_depth,
                batch_bytes=batch_bytes,
                newest=max(pages.newest for pages in found),
                most_untold=sum(slots) // 16,
            ),
            medium=MEDIUM_STORAGE,
        )


def _product(size: int, count: int) -> int:
    return size * count


def _require_room(setting: str, path: Path, needed: int) -> None:
    about = os.statvfs(path)
    total = about.f_blocks * about.f_frsize
    if total and needed > total:
        raise ConfigError(
            f"{setting} asks for {human_bytes(needed)} of disk space, but the file system of {path}"
            f" has {human_bytes(total)} in all: lower {setting}"
        )
