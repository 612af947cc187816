"""Ray's object store: `ray.get` on one node of an object that another node's actor has put. Verifies nothing.

The object lands in the receiving node's store, which is the place that readers map: that is the job. It is put anew
before each round, outside the timing; the target file stays unused, and the bytes are compared here.
"""

from __future__ import annotations

import os
import time

from common import MIB, arguments, mapped, rounds


def main() -> None:
    args = arguments()
    for key, value in args.settings.get("env", {}).items():
        os.environ[key] = value
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import numpy as np
    import ray
    from ray.cluster_utils import Cluster

    size = args.source.stat().st_size
    store = size * 5 // 4 + 64 * MIB
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": store, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1, object_store_memory=store, resources={"far": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    @ray.remote(resources={"far": 1}, num_cpus=0)
    class Holder:
        def put(self, path: str) -> list[object]:
            return [ray.put(np.memmap(path, np.uint8, "r"))]

    holder = Holder.remote()
    expected = np.frombuffer(mapped(args.source), np.uint8)
    first = True

    def transfer() -> float:
        nonlocal first
        [ref] = ray.get(holder.put.remote(str(args.source)))
        started = time.perf_counter()
        found = ray.get(ref)
        took = time.perf_counter() - started
        if first:
            assert np.array_equal(found, expected)
        first = False
        del found, ref
        time.sleep(1.0)  # both stores drop the object before the next is put
        return took

    rounds(transfer)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
