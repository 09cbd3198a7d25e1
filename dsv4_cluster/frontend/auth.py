"""API keys: hashed in the configuration, compared in constant time, never logged."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.errors import AuthError
from dsv4_cluster.frontend.caller import ANONYMOUS, Caller

KEY_PREFIX = "dsv4-"
KEY_BYTES = 32  # random ones, so that a plain hash is enough: nothing can be guessed
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # probes and scrapers


def new_key() -> str:
    """A fresh API key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """SHA-256 in hexadecimal, as the configuration holds it."""
    return hashlib.sha256(key.encode()).hexdigest()


class Keyring:
    """The keys that may come in."""

    def __init__(self, config: ApiConfig) -> None:
        self._callers = [
            (
                bytes.fromhex(key.sha256),
                Caller(key_name=key.name, tenant=key.tenant_name, priority=key.priority),
            )
            for key in config.keys
        ]

    def owner(self, key_name: str, tenant: str) -> Caller | None:
        """The key with this name, as it is configured for the tenant; None when it is not any more."""
        known = [caller for _, caller in self._callers] or [ANONYMOUS]
        return next((caller for caller in known if (caller.key_name, caller.tenant) == (key_name, tenant)), None)

    def identify(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Who calls. headers: names in lower case. The key stands in `Authorization: Bearer KEY` or `x-api-key: KEY`.

        Raises: AuthError without a key, or with one that is not configured.
        """
        if not self._callers or path in OPEN_PATHS:
            return ANONYMOUS
        key = _given_key(headers)
        if not key:
            raise AuthError("this endpoint needs an API key: Authorization: Bearer KEY, or x-api-key: KEY")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, caller in self._callers:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise AuthError("this API key is not known here")
        return found


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()
