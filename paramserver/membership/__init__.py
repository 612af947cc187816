"""The registry of live relays, masters and sealed versions: its seam, etcd behind it, and an etcd for laptops."""

from paramserver.membership.etcd import EtcdRegistry
from paramserver.membership.local import LocalEtcd
from paramserver.membership.memory import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Registry

__all__ = ["EtcdRegistry", "LocalEtcd", "MemoryRegistry", "MemoryStore", "Registry"]
