"""A frontend without a mesh that listens, in a thread of its own, for a browser."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from scripted import Scripted

from meshlm.frontend.http import server as http
from meshlm.frontend.http.connection import Timeouts
from meshlm.protocol.config import ServerConfig

LIMIT_S = 20


class Site:
    """A frontend that listens, in a thread of its own."""

    def __init__(self, **settings: Any) -> None:
        self.port, self._settings = 0, settings
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._down = asyncio.Event()
        self.backend: Any = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._up.wait(LIMIT_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dashboard"

    async def _serve(self) -> None:
        self.backend = Scripted(ServerConfig(responses_store="off", **self._settings))
        listener = http.listen("127.0.0.1", 0)
        server = http.make_server(self.backend.app, Timeouts(60, 60, 60), self.backend.routes.unsent)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self.port = listener.getsockname()[1]
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._up.set()
        await self._down.wait()
        self.backend.feed.close()
        server.should_exit = True
        await serving

    def do(self, action: Callable[[], Any]) -> Any:
        """What `action` gives in the frontend's loop."""

        async def done() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(LIMIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(LIMIT_S)
        self._loop.close()
