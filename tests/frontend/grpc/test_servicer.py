"""What the service takes of a call beside its message."""

from types import SimpleNamespace
from typing import Any

from scripted import Scripted
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.grpc import messages as requests
from meshlm.frontend.grpc.messages import GrpcResponse
from meshlm.frontend.grpc.servicer import Servicer
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.protocol.config import ServerConfig

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


async def test_a_call_belongs_to_the_trace_that_its_metadata_names() -> None:
    backend: Any = Scripted(ServerConfig(responses_store="off"))
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6]))
    metadata = (("authorization", "Bearer x"), ("traceparent", PARENT), ("tracestate", "a=1"))
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    ask = requests.generation(request, backend.resolved, backend.config.server)
    answer = GrpcResponse(AnswerHead(ask, "grpc-1", 0, "tiny", lambda: None))
    async with Servicer(backend)._running(answer, "Generate", context):
        assert len(answer.choices) == 1
    assert [one.trace_headers for one in backend.answers] == [{"traceparent": PARENT, "tracestate": "a=1"}]
