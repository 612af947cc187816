"""gRPC: server streaming of 1 MiB messages, `streams` channels at once, raw bytes (no protobuf). Verifies nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from common import MIB, Other, arguments, end_with_stdin, mapped, ranges, rounds, say

OPTIONS = [("grpc.max_receive_message_length", 8 * MIB), ("grpc.max_send_message_length", 8 * MIB)]


def send(view: memoryview, streams: int) -> None:
    def read(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        start, end = map(int, request.split())
        for at in range(start, end, MIB):
            yield bytes(view[at : min(at + MIB, end)])

    handler = grpc.method_handlers_generic_handler("bytes", {"read": grpc.unary_stream_rpc_method_handler(read)})
    server = grpc.server(ThreadPoolExecutor(streams), options=OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    say({"port": port})
    end_with_stdin()


def main() -> None:
    args = arguments()
    streams = args.settings.get("streams", 1)
    if args.role == "sender":
        send(memoryview(mapped(args.source)), streams)
    view = memoryview(mapped(args.target))
    address = f"127.0.0.1:{Other(args).said['port']}"
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
    calls = [grpc.insecure_channel(address, options=options).unary_stream("/bytes/read") for _ in range(streams)]
    pool = ThreadPoolExecutor(streams)

    def receive(job: tuple[grpc.UnaryStreamMultiCallable, tuple[int, int]]) -> None:
        call, (start, end) = job
        at = start
        for message in call(b"%d %d" % (start, end)):
            view[at : at + len(message)] = message
            at += len(message)
        assert at == end

    rounds(lambda: list(pool.map(receive, zip(calls, ranges(len(view), streams), strict=True))) and None)


if __name__ == "__main__":
    main()
