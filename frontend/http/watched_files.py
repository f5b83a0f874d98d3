"""Files that may change while a frontend serves: API keys, certificates. Used by the listeners of both protocols."""

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import NamedTuple

import structlog

from meshlm.protocol.config import ServerConfig
from meshlm.runtime import tls
from meshlm.runtime.api_keys import ApiKeys, KeyFileError
from meshlm.runtime.errors import ProcessFatal

LOOK_S = 1.0

_log = structlog.get_logger()
Stamp = tuple[tuple[int, int, int], ...]


class Watched(NamedTuple):
    """What is read again when one of these files has changed."""

    what: str
    paths: tuple[str, ...]
    read_again: Callable[[], None]


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """The context of a frontend's port. ProcessFatal: the files were good when the mesh started, and are not any more."""
    try:
        return tls.make_context(server)
    except tls.TLSError as error:
        raise ProcessFatal(str(error)) from None


def of_server(server: ServerConfig, keys: ApiKeys, reload_tls: Callable[[], None] | None) -> list[Watched]:
    """The files that a frontend with these settings watches."""
    if keys.problem:  # the file was good when the mesh started; it is looked at again when it changes
        _log.error("API keys not read; none of the file holds", reason=keys.problem)
    found = [Watched("API keys", (server.api_key_file,), keys.read_again)] if server.api_key_file else []
    if server.enable_ssl_refresh and reload_tls is not None:
        found.append(Watched("certificates", tls.files(server), reload_tls))
    return found


async def watch(files: list[Watched]) -> None:
    """Look at all once a second, for ever. What cannot be read is said once, and what held before goes on to hold."""
    stamps = [_stamp(one.paths) for one in files]
    while files:
        await asyncio.sleep(LOOK_S)
        for number, one in enumerate(files):
            if (now := _stamp(one.paths)) == stamps[number]:
                continue
            stamps[number] = now
            try:
                one.read_again()
            except (KeyFileError, tls.TLSError) as error:
                _log.warning("files not read again; those before hold", what=one.what, reason=str(error))
            else:
                _log.info("files read again", what=one.what)


def _stamp(paths: tuple[str, ...]) -> Stamp:
    """Changes when one of the files does, or is replaced or taken away."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
