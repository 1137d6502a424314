"""The records in etcd, the names of their keys, and their bytes."""
