"""An OpenTelemetry collector of its own process: OTLP by gRPC and by HTTP. It prints its two ports, then a line for each span."""

import http.server
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

_lock = threading.Lock()


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def attributes(found: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in found}


def take(request: Any) -> None:
    with _lock:
        for of_resource in request.resource_spans:
            resource = attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    line = {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "kind": span.kind,
                        "begin": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "attributes": attributes(span.attributes),
                        "events": [
                            {"name": one.name, "at": one.time_unix_nano, **attributes(one.attributes)}
                            for one in span.events
                        ],
                        "status": span.status.code,
                        "resource": resource,
                    }
                    print(json.dumps(line), flush=True)


class Service(service.TraceServiceServicer):
    def Export(self, request: Any, context: Any) -> Any:
        take(request)
        return messages.ExportTraceServiceResponse()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = messages.ExportTraceServiceRequest()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        request.ParseFromString(body)
        take(request)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = service.add_TraceServiceServicer_to_server
    add(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    print(json.dumps([port, web.server_port]), flush=True)
    sys.stdin.read()  # until the test ends


if __name__ == "__main__":
    main()
