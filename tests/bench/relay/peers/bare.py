"""A bare socket loop from one mapped file into another: no digests, no chunks, no protocol; `stripes` connections.

The sockets are tuned as a relay's are, so that what is left between the two is the relay's own work. `pages`: the
sender gives the kernel the file's own pages (sendfile) instead of copying them.
`piece` bounds what one send and one receive are given: small pieces stay in the processor's cache.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paramserver.data.frames import connect, send_all, send_file, tune
from tests.bench.relay.peers.common import Other, arguments, mapped, ranges, rounds, say

CONNECT_S = 5.0


def send(listener: socket.socket, part: memoryview, piece: int) -> None:
    sock, _ = listener.accept()
    while sock.recv(1):
        for at in range(0, len(part), piece):
            send_all(sock, part[at : at + piece])


def send_pages(listener: socket.socket, fd: int, start: int, end: int) -> None:
    sock, _ = listener.accept()
    while sock.recv(1):
        send_file(sock, fd, start, end - start)


def receive(sock: socket.socket, part: memoryview, piece: int) -> None:
    sock.sendall(b"!")
    filled = 0
    while filled < len(part):
        filled += sock.recv_into(part[filled : filled + piece])


def serve(stripes: int, listen: str, source: Path, piece: int, *, pages: bool) -> None:
    listeners = [socket.create_server((listen, 0)) for _ in range(stripes)]
    for listener in listeners:
        tune(listener)
    with source.open("rb") as file:
        fd = os.dup(file.fileno())
    view = memoryview(mapped(source))
    threads = [
        threading.Thread(target=send_pages, args=(listener, fd, start, end))
        if pages
        else threading.Thread(target=send, args=(listener, view[start:end], piece))
        for listener, (start, end) in zip(listeners, ranges(len(view), stripes), strict=True)
    ]
    for thread in threads:
        thread.start()
    say({"ports": [listener.getsockname()[1] for listener in listeners]})
    for thread in threads:
        thread.join()


def main() -> None:
    args = arguments()
    listen = args.settings.get("listen", "127.0.0.1")
    stripes, piece = args.settings.get("stripes", 2), args.settings.get("piece", 1 << 30)
    if args.role == "sender":
        serve(stripes, listen, args.source, piece, pages=args.settings.get("pages", False))
        return
    view = memoryview(mapped(args.target))
    socks = [connect(f"{listen}:{port}", CONNECT_S) for port in Other(args).said["ports"]]
    for sock in socks:
        sock.settimeout(None)
    parts = [view[start:end] for start, end in ranges(len(view), stripes)]
    pool = ThreadPoolExecutor(stripes)
    rounds(lambda: list(pool.map(receive, socks, parts, [piece] * stripes)) and None)
    for sock in socks:
        sock.close()


if __name__ == "__main__":
    main()
