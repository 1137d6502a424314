"""The cluster as the records in etcd show it, kept up to date by watches."""
