"""A bare socket loop from one mapped file into another: no digests, no chunks, no protocol; `stripes` connections.

The sockets are tuned as a relay's are, so that what is left between the two is the relay's own work.
`piece` bounds what one send and one receive are given: small pieces stay in the processor's cache.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from paramserver.data.wire import tune
from tests.bench.relay.peers.common import Other, arguments, mapped, ranges, rounds, say


def send(listener: socket.socket, part: memoryview, piece: int) -> None:
    sock, _ = listener.accept()
    tune(sock)
    while sock.recv(1):
        for at in range(0, len(part), piece):
            sock.sendall(part[at : at + piece])


def receive(sock: socket.socket, part: memoryview, piece: int) -> None:
    sock.sendall(b"!")
    filled = 0
    while filled < len(part):
        filled += sock.recv_into(part[filled : filled + piece])


def main() -> None:
    args = arguments()
    listen = args.settings.get("listen", "127.0.0.1")
    stripes, piece = args.settings.get("stripes", 2), args.settings.get("piece", 1 << 30)
    if args.role == "sender":
        view = memoryview(mapped(args.source))
        listeners = [socket.create_server((listen, 0)) for _ in range(stripes)]
        threads = [
            threading.Thread(target=send, args=(listener, view[start:end], piece))
            for listener, (start, end) in zip(listeners, ranges(len(view), stripes), strict=True)
        ]
        for thread in threads:
            thread.start()
        say({"ports": [listener.getsockname()[1] for listener in listeners]})
        for thread in threads:
            thread.join()
        return
    view = memoryview(mapped(args.target))
    socks = [socket.create_connection((listen, port)) for port in Other(args).said["ports"]]
    parts = [view[start:end] for start, end in ranges(len(view), stripes)]
    pool = ThreadPoolExecutor(stripes)
    rounds(lambda: list(pool.map(receive, socks, parts, [piece] * stripes)) and None)
    for sock in socks:
        sock.close()


if __name__ == "__main__":
    main()
