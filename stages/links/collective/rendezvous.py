"""Exchanges the addresses of a collective link's two sides: a few small keys, over the links' own gRPC server, with
mTLS.

torch.distributed asks for a store. The accepting side has one in its memory for each link. The dialling side reads and
writes it by calls with the link's token, which it received with the answer to its hello. No other port is opened, and
nobody else receives the token. Keys are few and values are small.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from torch._C._distributed_c10d import HashStore, Store

from headway.proto.data_pb2 import KeysReply, KeysRequest
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.shared_port import open_channel
from headway.stages.sockets.tls_identity import Identity, dialling

KEYS_METHOD: Final = "Keys"
MOST_KEYS: Final = 64
MOST_KEY_BYTES: Final = 256
MOST_VALUE_BYTES: Final = 4096
MOST_WAITING: Final = 4
MOST_WAIT_S: Final = 60.0
LOOK_EVERY_S: Final = 0.002
CALL_GRACE: Final = timedelta(seconds=5)
"""Time for a call to return after the other side's maximum wait for a key."""


class KeysRefusedError(Exception):
    """A request exceeds the limits of a link's keys."""


class LinkKeys:
    """The accepting side's keys of one link."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.store: Store = HashStore()
        self._num_waiting = 0

    async def answer(self, request: KeysRequest) -> KeysReply:
        """Answer a request. Raises KeysRefusedError."""
        if len(request.key.encode()) > MOST_KEY_BYTES or len(request.value) > MOST_VALUE_BYTES:
            raise KeysRefusedError(f"at most {MOST_KEY_BYTES} bytes of key and {MOST_VALUE_BYTES} of value")
        match request.operation:
            case KeysRequest.SET | KeysRequest.ADD:
                return self._write(request)
            case KeysRequest.GET:
                return await self._wait(request)
        raise KeysRefusedError("an unknown operation")

    def _write(self, request: KeysRequest) -> KeysReply:
        if self.store.num_keys() >= MOST_KEYS:
            raise KeysRefusedError(f"at most {MOST_KEYS} keys")
        if request.operation == KeysRequest.ADD:
            return KeysReply(is_found=True, number=self.store.add(request.key, request.number))
        self.store.set(request.key, request.value)  # type: ignore[arg-type]  # bytes are taken too
        return KeysReply(is_found=True)

    async def _wait(self, request: KeysRequest) -> KeysReply:
        if self._num_waiting >= MOST_WAITING:
            raise KeysRefusedError(f"at most {MOST_WAITING} calls wait")
        self._num_waiting += 1
        try:
            # In this order: a NaN gets the maximum.
            until = asyncio.get_running_loop().time() + min(MOST_WAIT_S, request.timeout_s)
            while not self.store.check([request.key]):
                if asyncio.get_running_loop().time() >= until:
                    return KeysReply(is_found=False)
                await asyncio.sleep(LOOK_EVERY_S)
            return KeysReply(is_found=True, value=self.store.get(request.key))
        finally:
            self._num_waiting -= 1


async def answer_keys(
    request: bytes, find: Callable[[str], LinkKeys | None], context: "grpc.aio.ServicerContext[bytes, bytes]"
) -> bytes:
    """Return the answer to Keys. find: returns the keys of a link by their token."""
    try:
        asked = KeysRequest.FromString(request)
    except DecodeError:
        asked = KeysRequest()
    keys = find(asked.token)
    if keys is None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no link has these keys")
        raise AssertionError("abort raises")
    try:
        return (await keys.answer(asked)).SerializeToString()
    except KeysRefusedError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


class KeysClient:
    """The dialling side's access to the keys. Inside `with` all calls share one connection; later ones make
    their own.
    """

    def __init__(self, loop: LoopThread, identity: Identity, address: str, *, node: str) -> None:
        """node: whose certificate is expected there."""
        self._loop = loop
        self._node = node
        self._credentials = dialling(identity)
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    def __enter__(self) -> Self:
        self._channel = self._loop.run(self._open(), timeout=CALL_GRACE, what=f"a channel to {self._address}")
        return self

    def __exit__(self, *_: object) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._loop.run(_close(channel), timeout=CALL_GRACE, what="closing a channel")

    def call(self, request: KeysRequest) -> KeysReply:
        """Call the other side, from any thread but the loop's. Raises RuntimeError, as torch's own stores do."""
        limit = timedelta(seconds=request.timeout_s) + CALL_GRACE
        try:
            return self._loop.run(
                self._call(request, limit.total_seconds()), timeout=limit + CALL_GRACE, what="keys of a collective link"
            )
        except (grpc.aio.AioRpcError, DecodeError, TimeoutError) as error:
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            raise RuntimeError(f"the keys of the link at {self._address}: {text}") from error

    async def _call(self, request: KeysRequest, limit_s: float) -> KeysReply:
        channel = self._channel
        if channel is not None:
            return await _ask(channel, request, limit_s)
        async with await self._open() as own:
            return await _ask(own, request, limit_s)

    async def _open(self) -> grpc.aio.Channel:
        options = (("grpc.use_local_subchannel_pool", 1),)
        return open_channel(self._address, self._credentials, node=self._node, options=options)


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close()


async def _ask(channel: grpc.aio.Channel, request: KeysRequest, limit_s: float) -> KeysReply:
    method: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/headway.data.Link/{KEYS_METHOD}")
    return KeysReply.FromString(await method(request.SerializeToString(), timeout=limit_s))


class PeerStore(Store):
    """The accepting side's keys as torch.distributed sees them. A key is written once, so a read value stays."""

    def __init__(self, client: KeysClient, token: str, *, timeout: timedelta) -> None:
        super().__init__()
        self._client = client
        self._token = token
        self._timeout = timeout
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Write a key."""
        content = value if isinstance(value, bytes) else str(value).encode()
        self._client.call(self._request(KeysRequest.SET, key, value=content))
        self._known[key] = content

    def get(self, key: str) -> bytes:
        """Read a key, once it is there. Raises RuntimeError when it is not in time."""
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Raises RuntimeError when they are not in time."""
        limit_s = (timeout or self._timeout).total_seconds()
        for key in keys:
            if key not in self._known and not self._read(key, limit_s):
                raise RuntimeError(f"the other side has not written {key} within {limit_s:g} s")

    def check(self, keys: Any) -> bool:
        """Return whether all keys are there."""
        return all(key in self._known or self._read(key, 0.0) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return self._client.call(self._request(KeysRequest.ADD, key, number=amount)).number

    def _read(self, key: str, limit_s: float) -> bool:
        reply = self._client.call(self._request(KeysRequest.GET, key, timeout_s=limit_s))
        if reply.is_found:
            self._known[key] = reply.value
        return reply.is_found

    def _request(self, operation: "KeysRequest.Operation", key: str, **fields: Any) -> KeysRequest:
        return KeysRequest(token=self._token, operation=operation, key=key, **fields)
