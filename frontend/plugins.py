"""What packages add to a frontend: parsers, stat loggers and a processor of inputs and outputs. Called by io.py at the start."""

from collections.abc import Mapping

from meshlm.frontend import endpoints
from meshlm.frontend.observe.stat_loggers import StatLoggers
from meshlm.frontend.requests.resolving import Resolving
from meshlm.protocol.config import MeshConfig
from meshlm.runtime import adapter_resolvers, io_processors
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.parsers import registry
from meshlm.runtime.plugins import ENDPOINTS, PluginError, names


def load(
    config: MeshConfig, index: int, loggers: StatLoggers, environment: Mapping[str, str]
) -> io_processors.IOProcessor | None:
    """Loads those that the configuration of frontend `index` asks for. ProcessFatal; stat loggers that cannot be had are left out."""
    server, resolved = config.server, config.resolved
    try:
        if not registry.is_own(server.tool_call_parser, server.reasoning_parser):
            registry.load(environment, server.tool_parser_plugin, server.reasoning_parser_plugin)
        if resolved is not None and resolved.stat_loggers:
            loggers.load(config, index, environment)
        name = server.io_processor_plugin
        return io_processors.make(name, config, environment) if name else None
    except (PluginError, registry.ParserError) as error:
        raise ProcessFatal(str(error)) from None


def load_endpoints(config: MeshConfig, environment: Mapping[str, str]) -> tuple[endpoints.PluginRoute, ...]:
    """Routes of other packages. ProcessFatal."""
    try:
        if not names(ENDPOINTS, environment):
            return ()
        from meshlm.frontend.routes.application import OPERATIONS  # all routes, which no other start needs here

        return endpoints.load(config, {one.path: one for one in OPERATIONS}, environment)
    except PluginError as error:
        raise ProcessFatal(str(error)) from None


def resolving(config: MeshConfig, environment: Mapping[str, str]) -> Resolving:
    """What finds adapters that nobody has loaded. ProcessFatal."""
    try:
        return Resolving(adapter_resolvers.make(config, environment))
    except PluginError as error:
        raise ProcessFatal(str(error)) from None
