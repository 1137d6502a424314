"""Sends files between nodes: calls whose answer is the file's bytes, in order, in pieces of any size.

A protobuf message around every piece would copy it more often. So these methods are next to the Node service of
control.proto, and only their requests are messages. The caller knows size and checksum from the records.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from headway.proto.control_pb2 import FetchDataRequest, FetchStateRequest

_SERVICE = "headway.control.Files"
_REQUESTS: dict[str, Any] = {"FetchState": FetchStateRequest, "FetchData": FetchDataRequest}


def add_byte_streams(server: grpc.aio.Server, methods: dict[str, Callable[[Any, Any], AsyncIterator[bytes]]]) -> None:
    """Let a server answer FetchState and FetchData, each by a method that takes the request and gRPC's context."""
    handlers: dict[str, Any] = {
        name: grpc.unary_stream_rpc_method_handler(method, request_deserializer=_REQUESTS[name].FromString)
        for name, method in methods.items()
    }
    server.add_registered_method_handlers(_SERVICE, handlers)


def byte_stream(channel: grpc.aio.Channel, name: str) -> Any:
    """Return the method of this name, to be called with its request."""
    return channel.unary_stream(f"/{_SERVICE}/{name}", request_serializer=_REQUESTS[name].SerializeToString)
