"""What lies in etcd: records, the names of their keys, their bytes."""
