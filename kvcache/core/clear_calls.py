"""The manager forgets: keys of a salt or an adapter, or everything since weights have changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcache.core.errors import ConfigError
from kvcache.core.event_calls import EventCalls
from kvcache.core.hashing import MAX_EPOCH, Fingerprint
from kvcache.core.values import text, whole


class ClearCalls(EventCalls):
    """Everything that makes keys unfindable. What is refused has cleared nothing."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What is hashed into every key."""
        return self._namespaces.fingerprint

    def clear(self, *, salt: str | None = None, lora: str | None = None) -> None:
        """Forget every key, or those of one salt or one adapter. One pass over the pages.

        Requests that hold pages run on, and leave no keys until they start anew.
        """
        if salt is not None:
            text(salt, "salt")
        if lora is not None:
            text(lora, "lora")
        self._clear(salt, lora, retire=False)

    def _clear(self, salt: str | None, lora: str | None, *, retire: bool) -> None:
        if salt is None and lora is None:
            self._call(self._lib.kvc_clear, retire)
            return
        numbers = np.array(self._namespaces.matching(salt, lora), np.uint32)
        rows = self._buffer("uint32_t", numbers)
        self._call(self._lib.kvc_clear_namespaces, rows, len(numbers), retire)

    def set_lora_version(self, lora: str, version: str) -> None:
        """The adapter was loaded again, with other weights: nothing of before is found any more.

        Requests that are open with it end without keys; abort and open them anew to have some.

        Args:
            lora: name of the adapter; the base model has no versions, see `set_weights_epoch`.
            version: names the content (a digest), and must not be the present one: a tier would go
                on to serve what it has under it. It may be shared with processes that load the
                same, and must not be with those that do not. To go back to an earlier version is
                to find in tiers what was stored under it.

        Raises:
            ConfigError: nothing was cleared.
        """
        if not text(lora, "lora"):
            raise ConfigError(
                "set_lora_version has an empty adapter name: that is the base model; use"
                " set_weights_epoch where its weights changed"
            )
        if not text(version, "version"):
            raise ConfigError(
                f"set_lora_version of {lora!r} has an empty version: name the content, by a digest"
            )
        if version == self._namespaces.lora_version(lora):
            raise ConfigError(
                f"version {version!r} of adapter {lora!r} is the present one: it must differ, because"
                " tiers would serve bytes of the old weights under equal keys; clear(lora=...)"
                " forgets what the device has and changes no key"
            )
        self._clear(None, lora, retire=True)
        self._namespaces.set_lora_version(lora, version)

    def set_weights_epoch(self, epoch: int) -> None:
        """The model's weights changed: nothing of before is found any more.

        Requests that are open end without keys; abort and open them anew to have some.

        Args:
            epoch: from 0 to 2^63 - 1, and not the present one: a tier would go on to serve what it
                has under it. To go back to an earlier epoch is to find in tiers what was stored
                under it.

        Raises:
            ConfigError: nothing was cleared.
        """
        number = whole(epoch, "the weights epoch", least=0, most=MAX_EPOCH)
        if number == self.fingerprint.weights_epoch:
            raise ConfigError(
                f"weights epoch {number} is the present one: it must differ, because tiers would"
                " serve bytes of the old weights under equal keys; clear() forgets what the device"
                " has and changes no key"
            )
        fingerprint = replace(self.fingerprint, weights_epoch=number)
        self._clear(None, None, retire=True)
        self._namespaces.fingerprint = fingerprint
