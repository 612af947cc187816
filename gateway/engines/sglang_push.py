"""The tensor that tells our weight loader inside SGLang where a snapshot lies.

SGLang takes pushed tensors as pickles, one per rank, base64. Ours is a constant program around a list of numbers,
written out here, so that the gateway needs neither torch nor a pickler: `[("laminar.manifest", torch.tensor(BYTES))]`.
"""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import msgspec

LOADER = "paramserver.plugins.sglang.load_snapshot"
"""What `--custom-weight-loader` must name for it."""
MANIFEST = "laminar.manifest"


def manifest_tensor(path: Path, version: int, digest: str) -> str:
    """One entry of `serialized_named_tensors`: UTF-8 JSON of path, version and root digest as a tensor of bytes."""
    manifest = msgspec.json.encode({"path": str(path), "version": version, "digest": digest})
    name = MANIFEST.encode()
    body = b"".join(
        [
            pickle.PROTO + b"\x02",
            pickle.EMPTY_LIST,
            pickle.MARK,
            pickle.BINUNICODE + len(name).to_bytes(4, "little") + name,
            pickle.GLOBAL + b"torch\ntensor\n",
            pickle.EMPTY_LIST,
            pickle.MARK,
            *(pickle.BININT1 + bytes([byte]) for byte in manifest),
            pickle.APPENDS,
            pickle.TUPLE1,
            pickle.REDUCE,
            pickle.TUPLE2,
            pickle.APPENDS,
            pickle.STOP,
        ]
    )
    return base64.b64encode(body).decode()
